"""Spark's types: DDL strings, objects of pyspark, and what is refused of them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vane_dagster.errors import SchemaError
from vane_dagster.types.spark import parse_return_type

FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [
        ("float", pa.float32()),
        ("byte", pa.int8()),
        ("long", pa.int64()),
        ("timestamp_ntz", pa.timestamp("us")),
        ("time(6)", pa.time64("us")),
        ("varchar(10)", pa.string()),
        ("timestamp_ltz", pa.timestamp("us", "UTC")),
        ("decimal", pa.decimal128(10, 0)),
        ("numeric(10, 2)", pa.decimal128(10, 2)),
        ("Array < array<DOUBLE> >", pa.list_(pa.list_(pa.float64()))),
        ("map<string,int>", pa.map_(pa.string(), pa.int32())),
        ("struct<a:float,b:array<float>>", pa.struct([("a", pa.float32()), ("b", FLOATS)])),
        ("a float, b array<float>", pa.struct([("a", pa.float32()), ("b", FLOATS)])),
        (FLOATS, FLOATS),
        ("a: float", pa.struct([("a", pa.float32())])),
        (
            "label STRING, score DOUBLE NOT NULL COMMENT 'of the label'",
            pa.struct([("label", pa.string()), ("score", pa.float64())]),
        ),
        ("`a b` int, `c``d` int", pa.struct([("a b", pa.int32()), ("c`d", pa.int32())])),
    ],
)
def test_a_ddl_string_is_the_type_that_spark_makes_of_it(ddl, kind):
    assert parse_return_type(ddl, "stage 'score'") == kind


@pytest.mark.parametrize(
    "ddl",
    [
        None, 3, float, ["float"],
        "", "array<flot>", "list<float>", "array", "array<float", "array<float>>", "array<>",
        "map<string>", "struct<>", "a float b int", "a float,", "a float, A int", "`a`", "`` int",
        "a int not", "string collate UNICODE_CI", "decimal(1,2,3)", "decimal(x)", "decimal(40,2)",
        "void", "a: : int", "struct<array<int>>", "struct<a>", "a array<float>>", "array<float:>",
    ],
)  # fmt: skip
def test_a_mistake_is_refused(ddl):
    with pytest.raises(SchemaError, match="Expected a DDL string") as caught:
        parse_return_type(ddl, "stage 'score'")
    assert str(caught.value).startswith(f"stage 'score': return_type {ddl!r}")


PLAIN = st.sampled_from(
    [
        ("boolean", pa.bool_()),
        ("tinyint", pa.int8()),
        ("bigint", pa.int64()),
        ("double", pa.float64()),
        ("string", pa.string()),
        ("timestamp_ntz", pa.timestamp("us")),
        ("decimal(7,3)", pa.decimal128(7, 3)),
    ]
)
NAMES = st.text("abc_1 `'<>,:", min_size=1, max_size=6)


def _nested(children):
    def struct(fields):
        ddl = ",".join(f"`{name.replace('`', '``')}`:{kind}" for name, (kind, _) in fields.items())
        return f"struct<{ddl}>", pa.struct([(name, kind) for name, (_, kind) in fields.items()])

    return st.one_of(
        children.map(lambda child: (f"array<{child[0]}>", pa.list_(child[1]))),
        st.tuples(PLAIN, children).map(
            lambda pair: (f"map<{pair[0][0]},{pair[1][0]}>", pa.map_(pair[0][1], pair[1][1]))
        ),
        st.dictionaries(NAMES, children, min_size=1, max_size=3).map(struct),
    )


TYPES = st.recursive(PLAIN, _nested, max_leaves=8)


@settings(max_examples=25, deadline=None)
@given(TYPES, st.booleans())
def test_every_nesting_of_types_is_parsed(pair, upper):
    ddl, kind = pair
    if upper and "`" not in ddl:
        ddl = ddl.upper().replace(",", " ,  ")
    assert parse_return_type(ddl, "stage 'score'") == kind
