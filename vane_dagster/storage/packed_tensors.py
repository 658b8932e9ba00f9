"""How parts store rows: tensors as bytes, and columns without nulls as required ones.

Parquet encodes lists element by element: 14 ns each, so 2 ms for an image of 224 x 224 x 3. In a
part each tensor is one fixed-size binary value, its memory, and the metadata of the column's field
has the type. A column stays as it is if an element is null, for bools, and inside of other types.
Encoding the marks of nulls takes a third of the time of a part, so a column without nulls has none;
the metadata of its field says that it may have some.
"""

from __future__ import annotations

import pyarrow as pa

from vane_dagster.types.schema import read_schema, schema_record
from vane_dagster.types.tensors import is_tensor

_TYPE = b"vane_dagster.tensor"
_NULLABLE = b"vane_dagster.nullable"


def may_be_packed(schema: pa.Schema) -> bool:
    """Return whether a file of these columns may have tensors as bytes."""
    return any(_width(field.type) for field in schema)


def packed(table: pa.Table) -> pa.Table:
    """Convert tensors to bytes, without a copy."""
    for place, field in enumerate(table.schema):
        storage = [chunk.storage for chunk in table.column(place).chunks if _width(field.type)]
        if not storage or any(chunk.flatten().null_count for chunk in storage):
            continue
        kind = pa.binary(_width(field.type))
        column = pa.chunked_array([_as_bytes(chunk, kind) for chunk in storage], kind)
        record = {_TYPE: schema_record(pa.schema([field.remove_metadata()]))}
        table = table.set_column(place, field.with_type(kind).with_metadata(record), column)
    return table


def without_null_marks(table: pa.Table) -> pa.Table:
    """Declare the columns without nulls as required, as encoding marks of nulls takes long."""
    fields = []
    for field, column in zip(table.schema, table.columns):
        if field.nullable and not (column.null_count or pa.types.is_null(field.type)):
            metadata = {**(field.metadata or {}), _NULLABLE: ""}
            field = field.with_nullable(False).with_metadata(metadata)
        fields.append(field)
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields, table.schema.metadata))


def unpacked(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Convert stored rows back to the rows of a schema, without a copy."""
    for field in (each for each in schema if is_tensor(each.type)):
        place = table.schema.get_field_index(field.name)
        if place >= 0 and pa.types.is_fixed_size_binary(table.schema.field(place).type):
            chunks = [_as_tensors(chunk, field.type) for chunk in table.column(place).chunks]
            table = table.set_column(place, field, pa.chunked_array(chunks, field.type))
    fields = [_declared(field) for field in table.schema]
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields, table.schema.metadata))


def schema_of_rows(stored: pa.Schema) -> pa.Schema:
    """Return the schema of the rows in a file with some schema."""
    return pa.schema([_declared(field) for field in stored])


def schema_of_file(schema: pa.Schema, stored: pa.Schema) -> pa.Schema:
    """Return the schema of rows, with the fields of their file for tensors that it has as bytes."""
    own = {field.name: field for field in stored if _TYPE in (field.metadata or {})}
    return pa.schema([own.get(field.name, field) for field in schema])


def _declared(field: pa.Field) -> pa.Field:
    metadata = dict(field.metadata or {})
    if (record := metadata.get(_TYPE)) is not None:
        return read_schema(record.decode()).field(0)
    if metadata.pop(_NULLABLE, None) is None:
        return field
    return field.with_nullable(True).with_metadata(metadata or None)


def _width(kind: pa.DataType) -> int:
    """Return the bytes of a row's tensor; 0 for another type, and for bools, which are bits."""
    if not is_tensor(kind) or pa.types.is_boolean(kind.value_type):
        return 0
    return int(kind.storage_type.list_size * kind.value_type.bit_width // 8)


def _as_bytes(rows: pa.Array, kind: pa.DataType) -> pa.Array:
    if not len(rows):
        return pa.array([], kind)
    values = rows.values
    data = values.buffers()[1].slice(values.offset * values.type.bit_width // 8)
    return pa.Array.from_buffers(kind, len(rows), [rows.buffers()[0], data], offset=rows.offset)


def _as_tensors(rows: pa.Array, kind: pa.DataType) -> pa.Array:
    valid, data = rows.buffers()
    flat, end = kind.storage_type, rows.offset + len(rows)
    values = pa.Array.from_buffers(kind.value_type, end * flat.list_size, [None, data])
    storage = pa.Array.from_buffers(flat, len(rows), [valid], offset=rows.offset, children=[values])
    return pa.ExtensionArray.from_storage(kind, storage)
