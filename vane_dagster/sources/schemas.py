"""The common columns of files with different columns: one rule for all sources of files.

| types in the files | common type |
|---|---|
| int32 and int64, uint8 and uint16, float32 and float64, and so on | the wider |
| decimals of one scale | the one with more digits |
| encodings of one type: dictionaries, large strings | the plain type |
| types that SQL reads as the same: times and timestamps of ms and us | as SQL reads them |
| null (a file with nulls alone) and another | the other |
| no such column in some files | the type in the others, with nulls |

Elements of lists, values of maps and fields of structs follow the same rules; a struct has the
fields of all files. Anything else is refused: integers with other signedness, integers and floats,
numbers and text, dates and timestamps, lists of different fixed sizes.

The columns are those of the first file, then the others in the order of the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from vane_dagster.errors import SourceError, names
from vane_dagster.types.schema import check_distinct, plain_type, seen_by_sql

_MAX_PROBLEMS = 10
_SHOWN_FILES = 2
_MAX_TYPE = 120
_NUMBERS = (pa.types.is_signed_integer, pa.types.is_unsigned_integer, pa.types.is_floating)


@dataclass(frozen=True)
class FileColumns:
    """The columns of a file, and how they become the common ones.

    Attributes:
        own: The file's columns, in the plain encodings of their types.
        cast: The common columns that have another type in the file, with the common types.
        absent: The common columns that the file lacks, with the common types.
    """

    own: pa.Schema
    cast: tuple[pa.Field, ...] = ()
    absent: tuple[pa.Field, ...] = ()

    @classmethod
    def of(cls, own: pa.Schema, common: pa.Schema) -> FileColumns:
        """Return how the columns of a file become others."""
        kinds = {each.name: each.type for each in own}
        cast = [each for each in common if kinds.get(each.name, each.type) != each.type]
        absent = [each for each in common if each.name not in kinds]
        return cls(own, tuple(cast), tuple(absent))

    @property
    def extra(self) -> str:
        """The text for the `extra` argument of `fragment_record`.

        It is empty if the file has the common columns with their types: a file that is added to the
        partition and changes neither leaves the identities of the other files' fragments unchanged.
        """
        texts = [json.dumps([f.name, str(f.type)]) for f in self.cast]
        texts += [json.dumps([f.name, str(f.type), "absent"]) for f in self.absent]
        return "".join(f"\n{text}" for text in texts)

    def detail(self, constants: Mapping[str, str | None] = {}) -> str:
        """The detail of the file's spans, as JSON; empty for a file that is read as it is."""
        lacking = {each.name: constants.get(each.name) for each in self.absent}
        record = {"cast": [each.name for each in self.cast], "constants": lacking}
        record = {name: value for name, value in record.items() if value}
        return json.dumps(record) if record else ""


@dataclass(frozen=True)
class CommonColumns:
    """The common columns of some files.

    Attributes:
        schema: The common columns.
        files: How each file's columns become these, in the order of the files.
    """

    schema: pa.Schema
    files: tuple[FileColumns, ...]


def common_columns(files: Sequence[tuple[str, pa.Schema]], location: str) -> CommonColumns:
    """Return the common columns of files, by the rules of this module."""
    kinds: dict[bytes, tuple[pa.Schema, list[str]]] = {}
    keys = []
    for url, found in files:
        key = found.remove_metadata().serialize().to_pybytes()  # hashed faster than a schema
        if key not in kinds:
            kinds[key] = (plain_schema(found), [])
        kinds[key][1].append(url)
        keys.append(key)
    schema = _merged(list(kinds.values()), location)
    columns = {key: FileColumns.of(own, schema) for key, (own, _) in kinds.items()}
    return CommonColumns(schema, tuple(columns[key] for key in keys))


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
            columns.append(table.column(index).cast(column.type))
    if not columns:
        return table.select([])
    return pa.Table.from_arrays(columns, schema=schema)


def wider_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that two types of a column have in common; None if they have none."""
    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    try:
        wide = pa.unify_schemas(schemas, promote_options="permissive").field("x").type
        if _holds(wide, one) and _holds(wide, other):
            return plain_type(wide)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    seen = seen_by_sql(one)
    return seen if seen is not None and seen_by_sql(other) == seen else None


def _holds(wide: pa.DataType, kind: pa.DataType) -> bool:
    """Return whether a type holds the values of another one as values of the same kind."""
    if wide == kind or pa.types.is_null(kind):
        return True
    if pa.types.is_struct(wide) and pa.types.is_struct(kind):
        is_distinct = len({each.name.lower() for each in wide}) == wide.num_fields
        return is_distinct and all(_holds(wide.field(f.name).type, f.type) for f in kind)
    if pa.types.is_map(wide):
        inner = (wide.key_type, kind.key_type), (wide.item_type, kind.item_type)
        return all(_holds(*each) for each in inner)
    if pa.types.is_list(wide) or pa.types.is_fixed_size_list(wide):
        return wide.id == kind.id and _holds(wide.value_type, kind.value_type)
    if pa.types.is_decimal(wide):
        return bool(pa.types.is_decimal(kind) and kind.scale == wide.scale)
    return any(is_number(wide) and is_number(kind) for is_number in _NUMBERS) or (
        (seen := seen_by_sql(wide)) is not None and seen_by_sql(kind) == seen
    )


def _merged(files: Sequence[tuple[pa.Schema, Sequence[str]]], location: str) -> pa.Schema:
    """Return the common columns, given distinct schemas with the URLs of the files of each."""
    columns: dict[str, pa.DataType] = {}
    first: dict[str, tuple[pa.Field, str]] = {}
    problems: dict[tuple[str, str], list[str]] = {}
    for schema, urls in files:
        check_distinct(schema.names, f"{location}, {urls[0]!r}")
        for column in schema:
            known, where = first.setdefault(column.name.lower(), (column, urls[0]))
            if known.name != column.name:
                other = f"{known.name!r} in {where!r}, and SQL ignores case"
                problems.setdefault((f"column {column.name!r} is", other), []).extend(urls)
                continue
            kind = wider_type(columns.get(column.name, column.type), column.type)
            if kind is None:
                found = f"column {column.name!r} is {_shown(column.type)}"
                expected = f"{_shown(known.type)} in {where!r}"
                problems.setdefault((found, expected), []).extend(urls)
            else:
                columns[column.name] = kind
    if problems:
        raise _refused(problems, location)
    return pa.schema(columns)


def _refused(problems: Mapping[tuple[str, str], Sequence[str]], location: str) -> SourceError:
    listed = [
        f"{found} in {names(urls, _SHOWN_FILES)}, but {expected}"
        for (found, expected), urls in problems.items()
    ]
    if len(listed) > _MAX_PROBLEMS:
        listed = [*listed[:_MAX_PROBLEMS], f"{len(listed) - _MAX_PROBLEMS} more such columns"]
    return SourceError(
        f"{location}: {'; '.join(listed)}. The files of a partition need columns of the same or "
        "wider types (int32 and int64, float32 and float64), and a column may be missing in some. "
        "Write the files again with one type, or take them out of the source"
    )


def _shown(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= _MAX_TYPE else f"{text[:_MAX_TYPE]}..."
