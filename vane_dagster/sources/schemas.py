"""The common columns of files with different columns: one rule for all sources of files.

A column has the type to which Arrow promotes its types in the files (``pa.unify_schemas``), and is
null in files that lack it. A value that this type does not hold is an error when it is read.

The columns are those of the first file, then the others in the order of the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from vane_dagster.errors import SourceError
from vane_dagster.types.schema import check_distinct, plain_type

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
    for url, found in files:
        key = found.remove_metadata().serialize().to_pybytes()  # hashed faster than a schema
        if key not in kinds:
            kinds[key] = (plain_schema(found), url)
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
            columns.append(_cast(table.column(index), column))
    if not columns:
        return table.select([])
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(values: pa.ChunkedArray, column: pa.Field) -> pa.ChunkedArray:
    try:
        return values.cast(column.type)
    except pa.ArrowInvalid:  # its text has the value
        text = f"column {column.name!r} has a value that {column.type} does not hold"
        raise pa.ArrowInvalid(text) from None


def wider_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type to which Arrow promotes two types of a column; None if there is none."""
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        return plain_type(pa.unify_schemas(schemas, promote_options="permissive").field("x").type)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def _merged(files: Sequence[tuple[pa.Schema, str]], location: str) -> pa.Schema:
    """Return the common columns, given distinct schemas with a file of each."""
    columns: dict[str, pa.DataType] = {}
    first: dict[str, tuple[pa.Field, str]] = {}
    problems: dict[str, str] = {}
    for schema, url in files:
        check_distinct(schema.names, f"{location}, {url!r}")
        for column in schema:
            known, where = first.setdefault(column.name.lower(), (column, url))
            kind = wider_type(columns.get(column.name, column.type), column.type)
            if kind is None or known.name != column.name:
                text = f"{column.name!r} is {column.type!s:.120} in {url!r}, but {known.name!r} is"
                problems.setdefault(column.name, f"{text} {known.type!s:.120} in {where!r}")
            else:
                columns[column.name] = kind
    if problems:
        listed = "; column ".join([*problems.values()][:_MAX_PROBLEMS])
        raise SourceError(
            f"{location}: column {listed}; {len(problems)} such columns in all. The files of a "
            "partition need columns of types that have a common one, as numbers have, and names "
            "that differ in more than case; a column may be missing in some. "
            "Write the files again with one type, or take them out of the source"
        )
    return pa.schema(columns)
