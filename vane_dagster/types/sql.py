"""Analysis of the SQL expressions of a `project`, using DuckDB's own parser."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from vane_dagster._keywords import columns_listed
from vane_dagster._lazy import duckdb
from vane_dagster.errors import DefinitionError, SchemaError, first_line, names
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.schema import (
    NO_ARROW_TYPE,
    check_column_names,
    check_storable,
    is_lost_in_arrow,
    plain_type,
    seen_by_sql,
    sql_name,
)

_NOT_ROW_LOCAL = {"WINDOW": "a window function", "SUBQUERY": "a subquery", "STAR": "a star"}

_UNDECLARED = frozenset({
    "ago", "current_catalog", "current_localtime", "current_localtimestamp", "format_type",
    "generate_subscripts", "geomean", "geometric_mean", "get_block_size", "json_group_array",
    "json_group_object", "json_group_structure", "pg_conf_load_time", "pg_get_constraintdef",
    "pg_get_viewdef", "pg_postmaster_start_time", "pg_sleep", "regexp_split_to_table", "user",
    "variant_group_array", "version", "wavg", "weighted_avg",
})  # fmt: skip
"""Functions that depend on more than their row, which DuckDB does not declare: the clock or the
version for those that it declares CONSISTENT, and what macros call."""
_NOT_ROW_DEPENDENT = "not a function of the row: a retry would give another value"


def quote(name: str) -> str:
    """Quote a column name as a SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote a text as a SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def select_list(columns: Sequence[tuple[str, str]]) -> str:
    """Format expressions with their names as a SQL select list."""
    return ", ".join(f"({expression}) AS {quote(name)}" for name, expression in columns)


def select(columns: Sequence[tuple[str, str]], where: str | None, table: str) -> str:
    """Build the SELECT statement of a projection."""
    return f"SELECT {select_list(columns)} FROM {table}" + (f" WHERE ({where})" if where else "")


def unused(name: str, taken: Iterable[str]) -> str:
    """Append underscores to a name until it is not taken."""
    known = {other.lower() for other in taken}
    while name in known:
        name += "_"
    return name


@functools.lru_cache(maxsize=4096)
def referenced_columns(expression: str, where: str) -> frozenset[str]:
    """Return the names that an expression may read from its input, maybe with lambda parameters."""
    columns = set()
    for node in _expressions(_parsed(expression, where)):
        if what := _beyond_its_row(node):
            raise DefinitionError(
                f"{where}: {expression!r} holds {what}; a project sees one row at a time, because "
                "fragments are computed apart. Compute it upstream of the pipeline"
            )
        if what := _unstable(node):
            raise _not_row_dependent(expression, what, where)
        if node.get("class") == "POSITIONAL_REFERENCE":
            raise DefinitionError(
                f"{where}: {expression!r} names a column by its position, #{node.get('index')}; "
                "which one that is depends on how the rows are read. Name the column"
            )
        if node.get("class") == "COLUMN_REF":
            first, *rest = node["column_names"]
            columns |= {first, *rest[:1]} if first.lower() == "source" else {first}
    return frozenset(columns)


def computed_from(
    columns: Sequence[tuple[str, str]], where: str | None, schema: pa.Schema
) -> list[str]:
    """Return the input columns that the expressions of a projection name."""
    texts = [text for _, text in columns] + ([where] if where else [])
    wanted = {name.lower() for text in texts for name in referenced_columns(text, "project")}
    return [name for name in schema.names if name.lower() in wanted]


def _not_row_dependent(expression: str, what: str, where: str) -> DefinitionError:
    return DefinitionError(
        f"{where}: {expression!r} holds {what}, which is {_NOT_ROW_DEPENDENT}. Put the value into "
        "the expression as a constant, or compute it upstream of the pipeline"
    )


def passed_through(columns: Sequence[tuple[str, str]], schema: pa.Schema) -> dict[str, str]:
    """Return the columns of a projection that are input columns."""
    known = {name.lower(): name for name in schema.names}
    paths = {name: plain_column(expression, name) for name, expression in columns}
    return {
        name: known[path.lower()] for name, path in paths.items() if path and path.lower() in known
    }


def is_column(expression: str, name: str, where: str) -> bool:
    """Return whether an expression is just a column."""
    column = plain_column(expression, where)
    return column is not None and column.lower() == name.lower()


@functools.lru_cache(maxsize=4096)
def conjuncts(expression: str, where: str) -> tuple[str, ...]:
    """Split a filter at its outer ANDs: a row passes it if it passes each of the results."""
    return tuple(_text(node) for node in _conjuncts(_parsed(expression, where)))


def _conjuncts(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if node.get("type") == "CONJUNCTION_AND":
        for child in node["children"]:
            yield from _conjuncts(child)
    else:
        yield node


def _text(node: Mapping[str, Any]) -> str:
    """Return the SQL of a parsed expression."""
    statement = json.loads(_asked("SELECT json_serialize_sql('SELECT 1')")[0][0])
    statement["statements"][0]["node"]["select_list"] = [{**node, "alias": ""}]
    text = _asked("SELECT json_deserialize_sql(?::VARCHAR)", [json.dumps(statement)])[0][0]
    return str(text).removeprefix("SELECT ")


@functools.lru_cache(maxsize=4096)
def plain_column(expression: str, where: str) -> str | None:
    """Return the column that an expression names; None if it computes something."""
    tree = _parsed(expression, where)
    path = list(tree.get("column_names", ()))
    if len(path) == 2 and path[0].lower() == "source":
        return str(path[1])
    return str(path[0]) if len(path) == 1 else None


def _parsed(expression: str, where: str) -> dict[str, Any]:
    statement = f"SELECT ({expression}) AS x FROM source"
    tree = json.loads(_asked("SELECT json_serialize_sql(?::VARCHAR)", [statement])[0][0])
    if tree["error"]:
        raise DefinitionError(f"{where}: {expression!r} is not valid SQL: {tree['error_message']}")
    select_lists = [s["node"].get("select_list", []) for s in tree["statements"]]
    if len(select_lists) != 1 or len(select_lists[0]) != 1:
        raise DefinitionError(f"{where}: {expression!r} is not a single SQL expression")
    return dict(select_lists[0][0])


def _asked(query: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
    """Run a query that reads none of the user's tables, and return its rows."""
    with shared().cursor() as cursor:
        return list(cursor.execute(query, list(parameters)).fetchall())


def _beyond_its_row(node: Mapping[str, Any]) -> str | None:
    kind, function = node.get("class"), str(node.get("function_name", "")).lower()
    if kind == "FUNCTION" and _functions().get(function) == frozenset({"aggregate"}):
        return f"the aggregate {function}()"
    if kind == "FUNCTION" and function in ("unnest", "unlist"):
        return f"{function}(), which makes many rows of one"
    if kind == "PARAMETER":
        return "a parameter"
    return _NOT_ROW_LOCAL.get(str(kind))


def _unstable(node: Mapping[str, Any]) -> str | None:
    """Return the function of a node if its arguments do not determine its value."""
    if node.get("class") != "FUNCTION":
        return None
    function = str(node.get("function_name", "")).lower()
    kinds = _functions().get(function, frozenset())
    one_argument = len(node.get("arguments", node.get("children", ()))) == 1
    if "unstable" in kinds or (function == "age" and one_argument):
        return f"{function}()"
    if kinds and kinds <= {"table", "table_macro", "pragma"}:
        return f"the table function {function}()"
    return None


@functools.lru_cache(maxsize=1)
def _functions() -> dict[str, frozenset[str]]:
    """Map DuckDB's function names to their kinds, with "unstable" for non-deterministic ones.

    Functions of times such as `+` are "consistent within a query" for times with a zone alone,
    because the zone of the session counts.
    """
    query = (
        "SELECT lower(function_name), list(DISTINCT function_type), "
        "bool_and(stability <> 'CONSISTENT') FROM duckdb_functions() GROUP BY 1"
    )
    functions = {name: frozenset({"unstable"}) for name in _UNDECLARED}
    for name, kinds, is_unstable in _asked(query):
        unstable = {"unstable"} if is_unstable and name != "error" else set()  # it has no value
        functions[name] = functions.get(name, frozenset()) | unstable | {*kinds}
    return functions


@functools.lru_cache(maxsize=1024)
def is_value_function(name: str) -> bool:
    """Return whether SQL reads an unknown column name as a function: current_date, user, ..."""
    try:
        _asked(f"SELECT {quote(name)}")
    except duckdb.Error:
        return False
    return True


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
    columns: tuple[tuple[str, str], ...], where: str | None, schema: pa.Schema, location: str
) -> pa.Schema:
    """Derive the output schema of a projection without any rows."""
    filters = [("where", f"({where})::BOOLEAN")] if where else []
    passed = passed_through(columns, schema)
    computed = [(name, expression) for name, expression in columns if name not in passed]
    wanted = set()
    for name, expression in (*computed, *filters):
        wanted |= _computed_from(expression, schema, f"{location}, column {name!r}")
    needed = [field for field in schema if field.name in wanted]
    kinds = {name: schema.field(column).type for name, column in passed.items()}
    with shared().cursor() as connection:
        _create_source(connection, needed or [f for f in schema if seen_by_sql(f.type)])
        for _, expression in filters:
            _bound_type(connection, expression, f"{location}: where = {where!r}", schema)
        for name, expression in computed:
            label = f"{location}: column {name!r} = {expression!r}"
            kinds[name] = _bound_type(connection, expression, label, schema)
    bound = pa.schema([pa.field(name, plain_type(kinds[name])) for name, _ in columns])
    check_storable(bound, location)
    return bound


def _computed_from(expression: str, schema: pa.Schema, label: str) -> set[str]:
    """Return the columns that an expression computes with."""
    names = {name.lower() for name in referenced_columns(expression, label)}
    used = {field.name for field in schema if field.name.lower() in names}
    for name in used:
        if seen_by_sql(schema.field(name).type) is None:
            raise SchemaError(
                f"{label}: {expression!r} computes with {name!r}, which is "
                f"{schema.field(name).type}; SQL has no type for its values. Pass it through as "
                "it is, and compute with it in a map_batches, or write it as another type"
            )
    absent = names - {column.lower() for column in used}
    refs = (node.get("column_names", ()) for node in _expressions(_parsed(expression, label)))
    if "source" in absent and any([each.lower() for each in ref] == ["source"] for ref in refs):
        raise DefinitionError(
            f"{label}: {expression!r} reads 'source' as a whole row, and no column has this name; "
            "name the columns, as in {'a': a, 'b': b}"
        )
    for name in absent:
        if name == "rowid" or is_value_function(name):
            raise _not_row_dependent(expression, name, label)
    return used


def _create_source(connection: duckdb.DuckDBPyConnection, fields: Sequence[pa.Field]) -> None:
    """Create an empty temporary table named source, with columns of the types SQL computes with."""
    seen = [(field.name, seen_by_sql(field.type)) for field in fields]
    kinds = [(quote(name), sql_name(kind)) for name, kind in seen if kind is not None]
    if all(kind for _, kind in kinds):
        listed = ", ".join(f"{name} {kind}" for name, kind in kinds)
        connection.execute(f"CREATE TEMP TABLE source ({listed})")
    else:
        connection.register("source", pa.Table.from_batches([], pa.schema(seen)))


def _bound_type(
    connection: duckdb.DuckDBPyConnection, expression: str, label: str, schema: pa.Schema
) -> pa.DataType:
    try:
        relation = connection.sql(select([("x", expression)], None, "source"))
        table, kind = relation.to_arrow_table(), relation.types[0]
    except duckdb.Error as error:
        text, known = first_line(error), {name.lower() for name in schema.names}
        named = [name for name in referenced_columns(expression, label) if f'"{name}"' in text]
        if missing := [name for name in named if name.lower() not in known]:
            listed = columns_listed(schema.names, missing[0])
        else:
            listed = names((f"{each.name} {each.type}" for each in schema), 20)
        message = f"{label} does not fit its input: {text} The input has {listed}"
        raise SchemaError(message) from None
    if is_lost_in_arrow(kind):
        raise SchemaError(f"{label} is {kind}; {NO_ARROW_TYPE}, for example with ::VARCHAR")
    return table.schema.field(0).type


def as_columns(
    columns: Mapping[str, str] | Sequence[str], where: str
) -> tuple[tuple[str, str], ...]:
    """Return the columns of a project as (name, expression) pairs."""
    if isinstance(columns, str) or not columns:
        raise DefinitionError(
            f"{where}: columns is {columns!r}; expected a list of column names, or a mapping of "
            'output column to SQL expression, such as {"id": "id", "text": "trim(text)"}'
        )
    if "*" in (columns.values() if isinstance(columns, Mapping) else columns):
        raise DefinitionError(f"{where}: columns has '*'; write include_columns=True for all")
    pairs = (
        list(columns.items())
        if isinstance(columns, Mapping)
        else [(c, quote(c) if isinstance(c, str) else c) for c in columns]
    )
    for name, expression in pairs:
        if not isinstance(name, str) or not isinstance(expression, str) or not expression.strip():
            raise DefinitionError(f"{where}: column {name!r} = {expression!r} is not SQL text")
        referenced_columns(expression, f"{where}, column {name!r}")
    check_column_names([name for name, _ in pairs], where)
    return tuple(pairs)


def expression_error(
    columns: Sequence[tuple[str, str]],
    where: str | None,
    run: Callable[[Sequence[tuple[str, str]], str | None], pa.Table],
    error: Exception,
    location: str,
) -> SchemaError:
    """Build the error of a projection, naming the expression that fails."""
    alone = [(f"column {name!r} = {text!r}", [(name, text)]) for name, text in columns]
    filters = [(f"where = {where!r}", [("x", "1")])] if where else []
    label = "a column of the project"
    for each, listed in filters + alone:
        try:
            run(listed, where)
        except duckdb.Error as error_here:
            label, error = each, error_here
            break
    reason = first_line(error)
    return SchemaError(
        f"{location}: {label} fails for the value of a row: {reason}. Change the expression, "
        "for example to TRY_CAST or TRY, which give null, or leave such rows out with where="
    )
