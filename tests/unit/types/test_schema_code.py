"""Schemas as code to paste."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from vane_dagster.errors import SchemaError
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.schema import (
    _ARROW_TYPES,
    check_storable,
    parse_schema,
    plain_type,
    schema_code,
    sql_type,
)

TYPES = {
    "int": pa.int64(),
    "vector": pa.list_(pa.float32(), 4),
    "half": pa.float16(),
    "utc": pa.timestamp("us", "UTC"),
    "time": pa.time32("s"),
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


def test_other_types_have_the_names_of_arrow():
    fields = pa.schema([("h", pa.float16()), ("l", pa.list_(pa.float16()))])
    assert schema_code(fields) == '{"h": "halffloat", "l": "list<item: halffloat>"}'
    with pytest.raises(SchemaError, match=r"'l' has the unknown type 'list<item: halffloat>'"):
        parse_schema({"l": "list<item: halffloat>"}, "here")


@pytest.mark.parametrize("name", _ARROW_TYPES)
@pytest.mark.parametrize("suffix", ["", "[]", "[3]", "[][4]", "[99999][]"])
def test_plain_types_are_those_of_duckdb(name: str, suffix: str):
    """They are known without DuckDB, because its start would take longer than the declaration."""
    cast = shared().sql(f"SELECT CAST(NULL AS {name}{suffix}) AS x")
    kind = plain_type(cast.to_arrow_table().schema.field(0).type)
    assert sql_type(f"{name}{suffix}") == sql_type(f"{name}{suffix}".lower()) == kind
    table = pa.table({"x": pa.nulls(0, kind)})
    pq.write_table(table, pa.BufferOutputStream())
    check_storable(table.schema, "here")


@pytest.mark.parametrize("name", ["FLOAT[0]", "FLOAT[100001]", "FLOAT[-1]", "FLOATS", "FLOAT[a]"])
def test_sizes_that_sql_has_not_are_refused(name: str):
    with pytest.raises(SchemaError, match="FLOAT"):
        parse_schema({"x": name}, "here")
