"""Spark's types as users write them: DDL strings and objects of `pyspark.sql.types`.

They are translated for DuckDB, which parses them. A few names mean another type in Spark. As in
Spark, `predict_batch_udf` returns scalars, arrays, or structs of these.
"""

from __future__ import annotations

import re

import pyarrow as pa

from vane_dagster._lazy import duckdb
from vane_dagster.errors import SchemaError, first_line
from vane_dagster.types.schema import sql_type
from vane_dagster.types.sql import quote

_OWN = {
    "byte": "TINYINT",
    "timestamp": "TIMESTAMPTZ",
    "timestamp_ltz": "TIMESTAMPTZ",
    "timestamp_ntz": "TIMESTAMP",
    **dict.fromkeys(("decimal", "dec", "numeric"), "DECIMAL(10,0)"),
}
_STRUCT = re.compile(r"\s*struct\s*<(.*)>\s*", re.DOTALL | re.IGNORECASE)
_ARRAY = re.compile(r"array\s*<(.*)>", re.DOTALL | re.IGNORECASE)
_COMMA = re.compile(r",(?![^(]*\))")
_FIELD = re.compile(r"\s*(\w+)(?:\s*:\s*|\s+)(\w.*)", re.DOTALL)


def parse_return_type(return_type: object, where: str) -> pa.DataType:
    """Convert the `return_type` of a Spark UDF to an Arrow type, as Spark converts it."""
    if isinstance(return_type, pa.DataType):
        return return_type
    if isinstance(return_type, type) and hasattr(return_type, "simpleString"):
        name = return_type.__name__
        raise SchemaError(f"{where}: return_type is the class {name}; write {name}()")
    ddl = getattr(return_type, "simpleString", lambda: return_type)()
    reason = f"it is a {type(ddl).__name__}"
    if isinstance(ddl, str):
        try:
            return sql_type(_as_sql(ddl))
        except (duckdb.Error, SchemaError) as error:
            reason = first_line(error)
    raise SchemaError(
        f"{where}: return_type {ddl!r} is not a type of Spark: {reason}. Expected a DDL string, "
        "such as 'array<float>' or 'label string, score double', or a pyspark.sql.types.DataType"
    )


def _as_sql(ddl: str) -> str:
    """Translate a type, or a list of columns, which is a struct."""
    struct = _STRUCT.fullmatch(ddl)
    fields = [*map(_FIELD.fullmatch, _COMMA.split(struct[1] if struct else ddl))]
    named = [f"{quote(each[1])} {_type_as_sql(each[2])}" for each in fields if each]
    if len(named) == len(fields):
        return f"STRUCT({', '.join(named)})"
    if struct:
        raise SchemaError("a field of the struct has no name or no type")
    return _type_as_sql(ddl)


def _type_as_sql(text: str) -> str:
    """Translate a scalar, or an array."""
    word = text.strip()
    if array := _ARRAY.fullmatch(word):
        return f"{_type_as_sql(array[1])}[]"
    return "TIME" if word.lower().startswith("time(") else _OWN.get(word.lower(), word)
