"""What a SQL expression of a `project` says, found by DuckDB's own parser."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from vane_dagster.declare.database import connect
from vane_dagster.declare.schema import check_distinct, check_storable, plain_type, sql_name
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
    columns = set()
    for node in _expressions(_parsed(expression, where)):
        if what := _beyond_its_row(node):
            raise DefinitionError(
                f"{where}: {expression!r} holds {what}; a project sees one row at a time, because "
                "fragments are computed apart. Compute it upstream of the pipeline"
            )
        if node.get("class") == "COLUMN_REF":
            first, *rest = node["column_names"]
            columns |= {first, *rest[:1]} if first.lower() == "source" else {first}
    return frozenset(columns)


def is_column(expression: str, name: str, where: str) -> bool:
    """Whether an expression is nothing but a column."""
    column = plain_column(expression, where)
    return column is not None and column.lower() == name.lower()


@functools.lru_cache(maxsize=4096)
def plain_column(expression: str, where: str) -> str | None:
    """The column that an expression is, as it is written; None if it computes something."""
    tree = _parsed(expression, where)
    path = list(tree.get("column_names", ()))
    if len(path) == 2 and path[0].lower() == "source":
        return str(path[1])
    return str(path[0]) if len(path) == 1 else None


def _parsed(expression: str, where: str) -> dict[str, Any]:
    statement = f"SELECT ({expression}) AS x FROM source"
    with connect() as connection:
        found = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [statement]).fetchone()
    assert found is not None
    tree = json.loads(found[0])
    if tree["error"]:
        raise DefinitionError(f"{where}: {expression!r} is not valid SQL: {tree['error_message']}")
    select_lists = [s["node"].get("select_list", []) for s in tree["statements"]]
    if len(select_lists) != 1 or len(select_lists[0]) != 1:
        raise DefinitionError(f"{where}: {expression!r} is not a single SQL expression")
    return dict(select_lists[0][0])


def _beyond_its_row(node: Mapping[str, Any]) -> str | None:
    kind, function = node.get("class"), str(node.get("function_name", "")).lower()
    if kind == "FUNCTION" and function in _aggregates():
        return f"the aggregate {function}()"
    if kind == "FUNCTION" and function in ("unnest", "unlist"):
        return f"{function}(), which makes many rows of one"
    if kind == "PARAMETER":
        return "a parameter"
    return _NOT_ROW_LOCAL.get(str(kind))


@functools.lru_cache(maxsize=1)
def _aggregates() -> frozenset[str]:
    names = "SELECT function_name FROM duckdb_functions() WHERE function_type"
    with connect() as connection:
        found = connection.execute(f"{names} = 'aggregate' EXCEPT {names} <> 'aggregate'")
        return frozenset(name for (name,) in found.fetchall())


def _expressions(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


@functools.lru_cache(maxsize=256)
def bind(
    columns: tuple[tuple[str, str], ...], where: str | None, schema: pa.Schema, culprit: str
) -> pa.Schema:
    """The output schema of a projection over `schema`, found without any rows.

    Raises:
        SchemaError: If a column is missing or an expression does not fit the types.
    """
    filters = [("where", f"({where})::BOOLEAN")] if where else []
    wanted = set()
    for name, expression in (*columns, *filters):
        found = referenced_columns(expression, f"{culprit}, column {name!r}")
        wanted |= {column.lower() for column in found}
    needed = [field for field in schema if field.name.lower() in wanted]
    fields = []
    with connect() as connection:
        _create_source(connection, needed or list(schema))
        for _, expression in filters:
            _bound_type(connection, expression, f"{culprit}: where = {where!r}", schema)
        for name, expression in columns:
            label = f"{culprit}: column {name!r} = {expression!r}"
            kind = _bound_type(connection, expression, label, schema)
            fields.append(pa.field(name, plain_type(kind)))
    bound = pa.schema(fields)
    check_storable(bound, culprit)
    return bound


def _create_source(connection: duckdb.DuckDBPyConnection, fields: Sequence[pa.Field]) -> None:
    """An empty table of the columns, called source."""
    kinds = [(quote(field.name), sql_name(field.type)) for field in fields]
    if all(kind for _, kind in kinds):
        listed = ", ".join(f"{name} {kind}" for name, kind in kinds)
        connection.execute(f"CREATE TABLE source ({listed})")
    else:
        connection.register("source", pa.Table.from_batches([], pa.schema(fields)))


def _bound_type(
    connection: duckdb.DuckDBPyConnection, expression: str, label: str, schema: pa.Schema
) -> pa.DataType:
    try:
        found = connection.sql(select([("x", expression)], None, "source")).to_arrow_table()
    except duckdb.Error as error:
        described = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise SchemaError(
            f"{label} does not fit its input: {str(error).strip().splitlines()[0]} The input has "
            f"{described}"
        ) from None
    return found.schema.field(0).type


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
    check_distinct([name for name, _ in pairs], where)
    return tuple(pairs)
