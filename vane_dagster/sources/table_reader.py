"""Reads rows of tables in the store, and of Arrow files that such a table refers to."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import SourceError
from vane_dagster.sources.base import ReadContext, SourceReader
from vane_dagster.sources.parquet_scan import scan
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.stored_tables import (
    ArrowRows,
    ParquetRows,
    loaded_places,
    tables,
)
from vane_dagster.types.kinds import as_lists, is_list_view
from vane_dagster.types.schema import plain_type

_OPENED = 64


@dataclass(frozen=True)
class TableReader(SourceReader):
    """Reads fragments of stored tables.

    Attributes:
        root: The store's root.
    """

    root: Location

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read the rows from Parquet files in the store, and from Arrow files without a copy."""
        pieces = [
            _arrow_rows(place, schema, context.location)
            if isinstance(place, ArrowRows)
            else scan(self._span(place, schema), schema, self.root.storage_options, context)
            for span in fragment.spans
            for place in loaded_places(span.detail)
        ]
        return pa.concat_tables(pieces) if pieces else schema.empty_table()

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record unchanged: another content would be another table."""
        return file

    def _span(self, rows: ParquetRows, schema: pa.Schema) -> FileSpan:
        """Return the span of rows of a file, whose columns may have narrower types there."""
        url = tables(self.root).file_url(rows.name)
        return FileSpan(url, rows.start, rows.stop, json.dumps({"cast": schema.names}))


def _arrow_rows(rows: ArrowRows, schema: pa.Schema, location: str) -> pa.Table:
    try:
        found = os.stat(rows.path)
    except OSError as error:
        raise SourceError(
            f"{location}: the dataset's Arrow file {rows.path!r} cannot be read on this machine: "
            f"{error.strerror}. Put the dataset on storage that all workers share, or give "
            "vd.huggingface(..., copy=True), which copies the rows into the store"
        ) from error
    if (found.st_size, found.st_mtime_ns) != (rows.size, rows.modified):
        raise SourceError(
            f"{location}: {rows.path!r} was replaced since the run was planned ({rows.size} bytes "
            f"then, {found.st_size} now). Run the partition again"
        )
    table = _opened(rows.path, rows.size, rows.modified).slice(rows.start, rows.stop - rows.start)
    return in_plain_types(table, schema)


@functools.lru_cache(maxsize=_OPENED)
def _opened(path: str, size: int, modified: int) -> pa.Table:
    """Map an Arrow file in the stream format into memory."""
    return pa.ipc.open_stream(pa.memory_map(path)).read_all()


def in_plain_types(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows in the plain encoding of their types, without the types of extensions."""
    columns = []
    for field in schema:
        column = table.column(field.name)
        if isinstance(column.type, pa.BaseExtensionType) and column.type != field.type:
            chunks = [chunk.storage for chunk in column.chunks]
            column = pa.chunked_array(chunks, column.type.storage_type)
        if is_list_view(column.type):
            column = as_lists(column)
        if pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def table_schema(schema: pa.Schema) -> pa.Schema:
    """Return columns in the plain encodings of their types, which Parquet can hold."""
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])


def _plain(kind: pa.DataType) -> pa.DataType:
    if is_list_view(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    return plain_type(kind)
