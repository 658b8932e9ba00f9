"""Names of types: schemas as code to paste, and Spark's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from vane_dagster.errors import SchemaError
from vane_dagster.types.schema import empty_table, parse_schema, schema_code
from vane_dagster.types.spark import parse_return_type

TYPES = {
    "int": pa.int64(),
    "vector": pa.list_(pa.float32(), 4),
    "half": pa.float16(),
    "utc": pa.timestamp("us", "UTC"),
    "time": pa.time32("ms"),
    "map": pa.map_(pa.string(), pa.int64()),
    "decimal": pa.decimal128(5, 2),
    "bytes": pa.binary(3),
    "tensor": vd.tensor("float32", (3, 4)),
    "mixed": pa.struct([("a b", pa.bool_()), ("d", pa.date32())]),
    'quo"ted': pa.struct([('x"y', pa.string())]),
}


@pytest.mark.parametrize("name", TYPES)
def test_the_code_of_a_schema_declares_it(name: str):
    schema = pa.schema([(name, TYPES[name])])
    assert parse_schema(eval(schema_code(schema)), "here") == schema


@pytest.mark.parametrize(
    ("declared", "stored"),
    [
        ("TIMESTAMP_S", pa.timestamp("ms")),
        ("TIMESTAMP_S[]", pa.list_(pa.timestamp("ms"))),
        (pa.timestamp("s", "UTC"), pa.timestamp("ms", "UTC")),
        (pa.struct([("d", pa.date64())]), pa.struct([("d", pa.date32())])),
        (pa.time32("s"), pa.time32("ms")),
    ],
)
def test_columns_have_types_that_parquet_keeps(declared: Any, stored: pa.DataType):
    schema = parse_schema({"x": declared}, "here")
    assert schema.field("x").type == stored
    out = pa.BufferOutputStream()
    pq.write_table(empty_table(schema), out)
    assert pq.read_table(pa.BufferReader(out.getvalue())).schema == schema


def test_a_type_that_parquet_has_not_is_refused():
    for kind in (pa.decimal128(5, -2), pa.month_day_nano_interval()):
        with pytest.raises(SchemaError, match=r"here: column 'x' .*which Parquet cannot hold"):
            parse_schema({"x": kind}, "here")


def test_other_types_have_the_names_of_arrow():
    fields = pa.schema([("h", pa.float16()), ("l", pa.list_(pa.float16()))])
    assert schema_code(fields) == '{"h": "halffloat", "l": "list<item: halffloat>"}'
    with pytest.raises(SchemaError, match=r"'l' has the unknown type 'list<item: halffloat>'"):
        parse_schema({"l": "list<item: halffloat>"}, "here")


@pytest.mark.parametrize("name", ["FLOAT[0]", "FLOAT[100001]", "FLOAT[-1]", "FLOATS", "FLOAT[a]"])
def test_sizes_that_sql_has_not_are_refused(name: str):
    with pytest.raises(SchemaError, match="FLOAT"):
        parse_schema({"x": name}, "here")


FLOATS = pa.list_(pa.float32())
DECIMAL = pa.decimal128(5, 2)


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [
        ("float", pa.float32()),
        ("byte", pa.int8()),
        ("long", pa.int64()),
        ("timestamp_ntz", pa.timestamp("us")),
        ("time(6)", pa.time64("us")),
        ("decimal", pa.decimal128(10, 0)),
        ("Array < array<DOUBLE> >", pa.list_(pa.list_(pa.float64()))),
        ("struct<a:float,b:array<float>>", pa.struct([("a", pa.float32()), ("b", FLOATS)])),
        ("a float, b array<float>", pa.struct([("a", pa.float32()), ("b", FLOATS)])),
        (FLOATS, FLOATS),
        ("a: float", pa.struct([("a", pa.float32())])),
        ("label STRING, n decimal(5, 2)", pa.struct([("label", pa.string()), ("n", DECIMAL)])),
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
        "a int not", "map<string,int>", "`a b` int", "struct<a:struct<b:int>>",
        "string collate UNICODE_CI", "decimal(1,2,3)", "decimal(x)", "decimal(40,2)",
        "void", "a: : int", "struct<array<int>>", "struct<a>", "a array<float>>", "array<float:>",
    ],
)  # fmt: skip
def test_a_mistake_is_refused(ddl):
    with pytest.raises(SchemaError, match="Expected a DDL string") as caught:
        parse_return_type(ddl, "stage 'score'")
    assert str(caught.value).startswith(f"stage 'score': return_type {ddl!r}")
