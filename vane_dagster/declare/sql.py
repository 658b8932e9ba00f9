"""What a SQL expression of a `project` says, found by DuckDB's own parser."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from vane_dagster.errors import DefinitionError, SchemaError

_NOT_ROW_LOCAL = {"WINDOW": "a window function", "SUBQUERY": "a subquery", "STAR": "a star"}


def quote(name: str) -> str:
    """A column name as a SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def select_list(columns: Sequence[tuple[str, str]]) -> str:
    """Expressions under their names."""
    return ", ".join(f"({expression}) AS {quote(name)}" for name, expression in columns)


def select(columns: Sequence[tuple[str, str]], where: str | None, table: str) -> str:
    """The statement of a projection: expressions under their names, and a filter."""
    return f"SELECT {select_list(columns)} FROM {table}" + (f" WHERE ({where})" if where else "")


@functools.lru_cache(maxsize=4096)
def referenced_columns(expression: str, where: str) -> frozenset[str]:
    """Names that an expression may take from its input; lambda parameters can be among them.

    Args:
        expression: One scalar SQL expression.
        where: The stage and column that hold it, for messages.

    Raises:
        DefinitionError: If it does not parse, or would not be local to a row.
    """
    with duckdb.connect() as connection:
        statement = f"SELECT ({expression}) AS x FROM source"
        found = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [statement]).fetchone()
    assert found is not None
    tree = json.loads(found[0])
    if tree["error"]:
        raise DefinitionError(f"{where}: {expression!r} is not valid SQL: {tree['error_message']}")
    select_lists = [s["node"].get("select_list", []) for s in tree["statements"]]
    if len(select_lists) != 1 or len(select_lists[0]) != 1:
        raise DefinitionError(f"{where}: {expression!r} is not a single SQL expression")
    columns = set()
    for node in _expressions(select_lists[0][0]):
        kind = node.get("class")
        if kind in _NOT_ROW_LOCAL:
            raise DefinitionError(
                f"{where}: {expression!r} holds {_NOT_ROW_LOCAL[kind]}; a project sees one row at "
                "a time, because fragments are computed apart. Compute it upstream of the pipeline"
            )
        if kind == "COLUMN_REF":
            columns.add(node["column_names"][0])
    return frozenset(columns)


def _expressions(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


def bind(
    columns: Sequence[tuple[str, str]], where: str | None, schema: pa.Schema, culprit: str
) -> pa.Schema:
    """The output schema of a projection over `schema`, found without any rows.

    Raises:
        SchemaError: If a column is missing or an expression does not fit the types.
    """
    source = schema.empty_table()
    with duckdb.connect() as connection:
        connection.register("source", source)
        _bind(connection, [("x", f"({where})::BOOLEAN")] if where else [], culprit, schema)
        return _bind(connection, columns, culprit, schema)


def _bind(
    connection: duckdb.DuckDBPyConnection,
    columns: Sequence[tuple[str, str]],
    culprit: str,
    schema: pa.Schema,
) -> pa.Schema:
    from vane_dagster.declare.schema import plain_type

    fields = []
    for name, expression in columns:
        try:
            found = connection.sql(select([("x", expression)], None, "source")).to_arrow_table()
        except duckdb.Error as error:
            raise SchemaError(
                f"{culprit}: column {name!r} = {expression!r} does not fit its input: "
                f"{str(error).strip().splitlines()[0]} The input has {_described(schema)}"
            ) from None
        if found.num_rows:
            raise SchemaError(
                f"{culprit}: column {name!r} = {expression!r} aggregates over rows; a project sees "
                "one row at a time. Compute it upstream of the pipeline"
            )
        fields.append(pa.field(name, plain_type(found.schema.field(0).type)))
    return pa.schema(fields)


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def as_columns(
    columns: Mapping[str, str] | Sequence[str], where: str
) -> tuple[tuple[str, str], ...]:
    """Columns of a project as (name, expression) pairs.

    Raises:
        DefinitionError: If there are none, or one is not a string or does not parse.
    """
    if isinstance(columns, str) or not columns:
        raise DefinitionError(
            f"{where}: columns is {columns!r}; expected a list of column names, or a mapping of "
            'output column to SQL expression, as {"id": "id", "text": "trim(text)"}'
        )
    pairs = (
        list(columns.items())
        if isinstance(columns, Mapping)
        else [(c, quote(c) if isinstance(c, str) else c) for c in columns]
    )
    for name, expression in pairs:
        if not isinstance(name, str) or not isinstance(expression, str) or not expression.strip():
            raise DefinitionError(f"{where}: column {name!r} = {expression!r} is not SQL text")
        referenced_columns(expression, f"{where}, column {name!r}")
    return tuple(pairs)
