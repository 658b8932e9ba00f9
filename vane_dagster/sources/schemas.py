"""The common columns of files with different columns: one rule for all sources of files.

The type of a column is that of Arrow's permissive unification, in its plain encoding; types that
Arrow refuses may still be one to SQL, such as timestamps of several time zones. A value that the
common type does not hold is an error when it is read, except that decimals beside floats become the
nearest double. A column that a file lacks is null there.

The columns are those of the first file, then the others in the order of the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from vane_dagster._texts import listed
from vane_dagster.errors import SourceError
from vane_dagster.types.casts import cast_table
from vane_dagster.types.kinds import holds
from vane_dagster.types.schema import check_column_names, plain_type, seen_by_sql

_MAX_PROBLEMS = 10


def common_columns(
    files: Sequence[tuple[str, pa.Schema]], location: str
) -> tuple[pa.Schema, list[str]]:
    """Return the common columns of files, and the `extra` of each file's fragments.

    The latter is empty for a file that has the common columns with their types: a file that is
    added and changes neither leaves the identities of the other files' fragments unchanged.
    """
    kinds: dict[bytes, tuple[pa.Schema, str]] = {}
    keys = []
    for url, own_schema in files:
        key = own_schema.remove_metadata().serialize().to_pybytes()  # hashed faster than a schema
        if key not in kinds:
            kinds[key] = (plain_schema(own_schema), url)
        keys.append(key)
    schema = _merged(list(kinds.values()), location)
    extras = {}
    for key, (own, _) in kinds.items():
        differ = [[each.name, str(each.type)] for each in schema if each not in own]
        extras[key] = "".join(f"\n{json.dumps(each)}" for each in differ)
    return schema, [extras[key] for key in keys]


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a file, each in the plain encoding of its type."""
    return pa.schema([pa.field(f.name, plain_type(f.type)) for f in schema])


def conform(
    table: pa.Table, schema: pa.Schema, constants: Mapping[str, str | None] = {}
) -> pa.Table:
    """Convert rows of a file to common columns: cast types, and add absent columns."""
    count = table.num_rows
    columns = []
    for column in schema:
        index = table.schema.get_field_index(column.name)
        if (text := constants.get(column.name)) is not None:
            value = pa.array([text]).cast(column.type)[0]
            columns.append(pa.chunked_array([pa.repeat(value, count)]))
        elif index < 0 or pa.types.is_null(table.schema.field(index).type):
            columns.append(pa.chunked_array([pa.nulls(count, column.type)]))
        else:
            columns.append(table.column(index))
    if not columns:
        return table.select([])
    return cast_table(pa.table(columns, schema.names), schema)


def wider_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that two types of a column have in common; None if they have none."""
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        wide = pa.unify_schemas(schemas, promote_options="permissive").field("x").type
        return None if holds(wide, _is_ambiguous) else plain_type(wide)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        seen = seen_by_sql(one)
        return seen if seen is not None and seen_by_sql(other) == seen else None


def _is_ambiguous(kind: pa.DataType) -> bool:
    """Return whether two fields of a struct have one name in SQL, which ignores case."""
    names = {each.name.lower() for each in kind} if pa.types.is_struct(kind) else ()
    return bool(names) and len(names) < kind.num_fields


def _merged(files: Sequence[tuple[pa.Schema, str]], location: str) -> pa.Schema:
    """Return the common columns, given distinct schemas with a file of each."""
    columns: dict[str, pa.DataType] = {}
    first: dict[str, tuple[pa.Field, str]] = {}
    problems: dict[str, str] = {}
    for schema, url in files:
        check_column_names(schema.names, f"{location}, {url!r}")
        for column in schema:
            known, where = first.setdefault(column.name.lower(), (column, url))
            kind = wider_type(columns.get(column.name, column.type), column.type)
            if kind is None or known.name != column.name:
                text = f"column {column.name!r} is {column.type!s:.120} in {url!r}, but "
                text += f"{known.name!r} is {known.type!s:.120} in {where!r}"
                problems.setdefault(column.name, text)
            else:
                columns[column.name] = kind
    if problems:
        raise SourceError(
            f"{location}: {listed([*problems.values()], _MAX_PROBLEMS, '; ')}. The files of a "
            "partition need columns of types that Arrow can unify, such as numbers, whose names "
            "differ in more than case; a column may be missing in some. Write the files again with "
            "one name and type, or take them out of the source"
        )
    return pa.schema(columns)
