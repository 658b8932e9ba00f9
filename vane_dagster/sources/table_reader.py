"""Reads rows of tables in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from vane_dagster.sources.base import SourceReader, unreadable
from vane_dagster.sources.parquet_scan import read_rows
from vane_dagster.sources.schemas import conform
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.stored_tables import ParquetRows, joined, places_of, tables


@dataclass(frozen=True)
class TableReader(SourceReader):
    """Reads fragments of stored tables.

    Attributes:
        root: The store's root.
    """

    root: StoragePath

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        """Read the rows from Parquet files in the store."""
        pieces = self.tables(fragment, schema.names, location)
        tables = [conform(rows, schema) for rows in pieces]  # a file may have narrower types
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def tables(
        self, fragment: FragmentRecord, columns: Sequence[str], location: str
    ) -> list[pa.Table]:
        """Read rows: those of the columns that a file has, with its own types.

        Returns:
            A table for consecutive rows of a file. Each Parquet file is read once.
        """
        places = joined(place for span in fragment.spans for place in places_of(span))
        edges: dict[str, list[int]] = {}
        for place in places:
            edges.setdefault(place.name, []).extend((place.start, place.stop))
        first = {name: min(each) for name, each in edges.items()}

        def read(name: str) -> pa.Table:
            rows = ParquetRows(name, first[name], max(edges[name]))
            return _stored_rows(self.root, rows, columns, location)

        by_place = dict(zip(edges, in_threads(read, edges)))

        def rows_at(place: ParquetRows) -> pa.Table:
            rows = by_place[place.name]
            return rows.slice(place.start - first[place.name], place.stop - place.start)

        return list(map(rows_at, places))

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record unchanged: another content would be another table."""
        return file


def _stored_rows(
    root: StoragePath, rows: ParquetRows, columns: Sequence[str], location: str
) -> pa.Table:
    """Read rows of a Parquet file in the store."""
    folder = tables(root)
    file = StoragePath(folder.file_url(rows.name), folder.storage_options)
    try:
        return read_rows(file, rows.start, rows.stop, columns)
    except Exception as error:  # drivers raise their own exception classes
        is_gone = isinstance(error, FileNotFoundError)
        fix = "It was deleted from the store: run the partition again" if is_gone else None
        raise unreadable(file.url, error, location, fix) from error
