"""Schemas as users write them: SQL type strings parsed by DuckDB, or a `pyarrow.Schema`."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import pyarrow as pa

from vane_dagster._lazy import duckdb, pq
from vane_dagster.errors import SchemaError, UdfError, first_line
from vane_dagster.types.duckdb_connection import connect
from vane_dagster.types.id_texts import parse_kind
from vane_dagster.types.kinds import is_list, is_text, mapped
from vane_dagster.types.tensors import is_tensor, storage_type, tensor_name

ERROR_COLUMN = "error"
"""The column in which `on_error="null"` stores the error of a row."""

INFER = "infer"
"""The schema of a stage that has none yet: its first run infers it."""

SchemaLike = Union[pa.Schema, Mapping[str, Union[str, pa.DataType]]]


def parse_schema(schema: SchemaLike, where: str) -> pa.Schema:
    """Convert a mapping of column name to SQL type, or a `pyarrow.Schema`, to the latter."""
    if isinstance(schema, pa.Schema):
        fields = list(schema)
    elif isinstance(schema, Mapping):
        fields = [pa.field(name, _column_type(name, kind, where)) for name, kind in schema.items()]
    else:
        raise SchemaError(
            f"{where}: schema is a {type(schema).__name__}; expected a mapping of column name to "
            'SQL type, such as {"id": "BIGINT", "embedding": "FLOAT[384]"}, or a pyarrow.Schema'
        )
    if not fields:
        raise SchemaError(f"{where}: schema has no columns; name each column that comes out")
    check_column_names([field.name for field in fields], where)
    parsed = pa.schema([pa.field(field.name, plain_type(field.type)) for field in fields])
    check_storable(parsed, where)
    return parsed


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows; Arrow's own method fails for tensors inside of other types."""
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def check_column_names(names: Sequence[str], where: str) -> None:
    """Validate that columns have names, and distinct ones in SQL, for which "a" is "A"."""
    first: dict[str, str] = {}
    for name in names:
        if not name:
            raise SchemaError(f"{where}: a column has no name, which SQL needs; give it one")
        if (known := first.setdefault(name.lower(), name)) != name or names.count(name) > 1:
            raise SchemaError(
                f"{where}: columns {known!r} and {name!r} are the same name to SQL, which ignores "
                "case; rename one"
            )


def check_storable(schema: pa.Schema, where: str) -> None:
    """Validate that Parquet can store every type of a schema."""
    for field in schema:
        if _PLAIN.fullmatch(sql_name(field.type) or ""):
            continue
        try:
            pq.write_table(pa.Table.from_batches([], pa.schema([field])), pa.BufferOutputStream())
        except (pa.ArrowNotImplementedError, OSError):
            raise SchemaError(
                f"{where}: column {field.name!r} is {field.type}, which Parquet cannot hold; "
                "make it another type, for example with ::VARCHAR"
            ) from None


def _column_type(column: object, kind: object, where: str) -> pa.DataType:
    if not isinstance(column, str) or not column:
        raise SchemaError(f"{where}: column name {column!r} is not a non-empty string")
    if isinstance(kind, pa.DataType):
        return kind
    if not isinstance(kind, str):
        raise SchemaError(
            f"{where}: type of column {column!r} is {kind!r}; expected a SQL type string such as "
            "'BIGINT', 'VARCHAR' or 'FLOAT[384]'"
        )
    try:
        return sql_type(kind)
    except SchemaError as error:
        raise SchemaError(f"{where}: column {column!r} is {error}") from None
    except duckdb.Error as error:
        with contextlib.suppress(ValueError):
            return parse_kind(kind)
        raise SchemaError(
            f"{where}: column {column!r} has the unknown type {kind!r} ({first_line(error)}). Use "
            "a DuckDB SQL type: BIGINT, DOUBLE, FLOAT, VARCHAR, BOOLEAN, TIMESTAMP, FLOAT[], "
            "FLOAT[384], STRUCT(a INTEGER, b VARCHAR), ...; or vd.tensor(dtype, shape)"
        ) from None


@functools.lru_cache(maxsize=512)
def sql_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a SQL type string, as DuckDB maps it."""
    if plain := _PLAIN.fullmatch(kind):
        known = _ARROW_TYPES[plain[1].upper()]
        for size in _SIZES.findall(plain[2]):
            known = pa.list_(known, int(size or -1))
        return known
    with connect() as connection:
        relation = connection.sql(f"SELECT CAST(NULL AS {kind}) AS x")
        if relation.columns != ["x"]:
            raise duckdb.ParserException(f"{kind!r} is not a single type")
        if is_lost_in_arrow(relation.types[0]):
            raise SchemaError(f"{kind}: {NO_ARROW_TYPE}, such as 'VARCHAR'")
        return plain_type(relation.to_arrow_table().schema.field(0).type)


_LOST_IN_ARROW = frozenset({"time with time zone", "uhugeint", "bit", "bignum", "variant"})
NO_ARROW_TYPE = "a column cannot hold all of its values as they are; make it another type"


def is_lost_in_arrow(kind: Any) -> bool:
    """Return whether DuckDB exports values of a type to Arrow incompletely or as raw bytes."""
    if kind.id not in ("list", "array", "struct", "map", "union"):
        return kind.id in _LOST_IN_ARROW
    return any(is_lost_in_arrow(child) for name, child in kind.children if name != "size")


_SQL_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.large_string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.large_binary(): "BLOB",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME",
    pa.time64("ns"): "TIME_NS",
    pa.timestamp("ms"): "TIMESTAMP_MS",
    pa.timestamp("us"): "TIMESTAMP",
    pa.timestamp("ns"): "TIMESTAMP_NS",
}


_ARROW_TYPES: dict[str, pa.DataType] = {}
for _type, _name in _SQL_NAMES.items():
    _ARROW_TYPES.setdefault(_name, _type)
_PLAIN = re.compile(rf"({'|'.join(_ARROW_TYPES)})((?:\[(?:[1-9]\d{{0,4}})?\])*)", re.IGNORECASE)
"""Types whose Arrow types need no DuckDB, which takes 40 ms to start."""
_SIZES = re.compile(r"\[(\d*)\]")


def sql_name(kind: pa.DataType) -> str | None:
    """Return DuckDB's SQL type string for an Arrow type; None if SQL has no such type.

    It is the inverse of `sql_type`. It does not ask DuckDB through Arrow, because that imports
    pandas.
    """
    if kind in _SQL_NAMES:
        return _SQL_NAMES[kind]
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE" if kind == pa.timestamp("us", "UTC") else None
    if pa.types.is_decimal128(kind):
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_struct(kind):
        inner = [(field.name.replace('"', '""'), sql_name(field.type)) for field in kind]
        named = [f'"{name}" {child}' for name, child in inner if child]
        return f"STRUCT({', '.join(named)})" if inner and len(named) == len(inner) else None
    if pa.types.is_map(kind):
        pair = (sql_name(kind.key_type), sql_name(kind.item_type))
        return f"MAP({pair[0]}, {pair[1]})" if all(pair) else None
    if is_list(kind):
        child, is_sized = sql_name(kind.value_type), pa.types.is_fixed_size_list(kind)
        if child is None or (is_sized and kind.list_size > MAX_SQL_ARRAY):
            return None
        return f"{child}[{kind.list_size if is_sized else ''}]"
    return None


def type_name(kind: pa.DataType) -> str:
    """Return how a user declares a type: as SQL, or as a tensor; else its name in Arrow."""
    return tensor_name(kind) if is_tensor(kind) else sql_name(kind) or str(kind)


def type_code(kind: pa.DataType) -> str:
    """Return the Python code of a type in a schema: a tensor, or the name in SQL, else in Arrow."""
    if is_tensor(kind):
        return tensor_name(kind)
    return json.dumps(type_name(kind), ensure_ascii=False)


def schema_code(fields: Iterable[pa.Field]) -> str:
    """Return columns as Python code, for example ``{"label": "VARCHAR", "score": "DOUBLE"}``."""
    pairs = (
        f"{json.dumps(field.name, ensure_ascii=False)}: "
        f"{'...' if is_untyped(field.type) else type_code(field.type)}"
        for field in fields
    )
    return f"{{{', '.join(pairs)}}}"


def is_untyped(kind: pa.DataType) -> bool:
    """Return whether a type is null or of no values, or a list, struct or map of such a one."""
    if pa.types.is_null(kind) or (pa.types.is_struct(kind) and not kind.num_fields):
        return True
    if pa.types.is_fixed_size_list(kind) and not kind.list_size:
        return True
    return any(is_untyped(kind.field(index).type) for index in range(kind.num_fields))


def merged_types(schemas: Iterable[pa.Schema], location: str) -> pa.Schema:
    """Combine the columns of several results. Numbers of different types get the wider type."""
    try:
        merged = pa.unify_schemas([pa.schema([]), *schemas], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise UdfError(
            f"{location}: a column has different types in several results: {first_line(error)}; "
            "convert it in the function, so that it has one type"
        ) from None
    return pa.schema([(field.name, field.type) for field in merged])


def seen_by_sql(kind: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type with which SQL computes a column; it can hold each of its values.

    If it differs from `kind`, a column that only passes through is kept out of SQL.
    """
    if is_tensor(kind):
        return seen_by_sql(storage_type(kind))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("ns" if kind.unit == "ns" else "us", "UTC" if kind.tz else None)
    if kind in _SQL_NAMES or pa.types.is_null(kind):
        return kind
    if pa.types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale) if kind.precision <= 38 else None
    for is_kind, seen in _SEEN:
        if is_kind(kind):
            return seen
    if pa.types.is_struct(kind):
        fields = [(field.name, seen_by_sql(field.type)) for field in kind]
        return pa.struct(fields) if all(seen is not None for _, seen in fields) else None
    if pa.types.is_map(kind):
        key, item = seen_by_sql(kind.key_type), seen_by_sql(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if is_list(kind):
        child = seen_by_sql(kind.value_type)
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
        sized = 0 < size <= MAX_SQL_ARRAY
        return None if child is None else pa.list_(child, size if sized else -1)
    return None


MAX_SQL_ARRAY = 100_000
"""The largest size of DuckDB's ARRAY type. SQL sees longer lists of a fixed size as lists."""

_SEEN = (
    (pa.types.is_float16, pa.float32()),
    (pa.types.is_time, pa.time64("us")),
    (pa.types.is_date64, pa.date32()),
    (pa.types.is_fixed_size_binary, pa.binary()),
)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Normalize child names and encodings of a type, so that equal types compare equal.

    Large and view types become the plain ones: pandas writes large strings, DuckDB reads plain
    ones. Extension types become the type underneath, except for tensors of numbers. Times in
    seconds and dates in milliseconds become what Parquet has: a part is read as it was written.
    """
    return mapped(kind, _plain)


def _plain(kind: pa.DataType) -> pa.DataType:
    if is_text(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", kind.tz)
    if is_tensor(kind):
        return pa.fixed_shape_tensor(kind.value_type, kind.shape, dim_names=kind.dim_names)
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    return _IN_PARQUET.get(kind, kind)


_IN_PARQUET = {pa.date64(): pa.date32(), pa.time32("s"): pa.time32("ms")}


def schema_record(schema: pa.Schema) -> str:
    """Return a schema as text for a JSON record."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def read_schema(record: str) -> pa.Schema:
    """Return the schema of a text that `schema_record` made."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record)))
