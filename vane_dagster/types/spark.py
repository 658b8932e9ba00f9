"""Spark's types as users write them: DDL strings and objects of `pyspark.sql.types`.

They are translated for DuckDB, which parses them. A few names mean another type in Spark.
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
_NESTED = {"array": ("", "[]"), "map": ("MAP(", ")"), "struct": ("STRUCT(", ")")}
_IGNORED = re.compile(r"not\s+null|comment\s.*", re.IGNORECASE | re.DOTALL)
_TOKEN = re.compile(
    r"(?:array|map|struct)\s*<|not\s+null\b|comment\s*(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|`(?:[^`]|``)*`\s*:?|\w+\s*:|time\s*\(\d\)|\w+(?:\s*\([^()]*\))?|\S",
    re.DOTALL | re.IGNORECASE,
)


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
    tokens = _TOKEN.findall(ddl)
    if len(tokens) > 1 and not tokens[0].endswith("<"):
        tokens = ["struct<", *tokens, ">"]
    parts: list[str] = []
    inside: list[str] = []
    is_name = False
    for token in tokens:
        word = token.removesuffix("<").strip().lower()
        if is_name:
            name = token.removesuffix(":").strip()
            is_quoted = name.startswith("`")
            parts.append(quote(name[1:-1].replace("``", "`") if is_quoted else name))
            is_name = False
        elif token.endswith("<") and word in _NESTED:
            inside.append(word)
            parts.append(_NESTED[word][0])
            is_name = word == "struct"
        elif token == ">" and inside:
            parts[-1] += _NESTED[inside.pop()][1]
        elif not _IGNORED.fullmatch(token):
            is_name = token == "," and inside[-1:] == ["struct"]
            parts.append("TIME" if word.startswith("time(") else _OWN.get(word, token))
    if inside:
        raise SchemaError("a '<' is not closed, or has no name of a field after it")
    return " ".join(parts)
