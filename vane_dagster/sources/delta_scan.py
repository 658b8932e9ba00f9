"""Reads of the data files of a Delta table in a worker: deletes and the filter are applied.

Positions in a data file that has deletes or a filter differ from the numbers of its rows: the
detail of a span says which positions hold the rows.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster.errors import SourceError
from vane_dagster.sources.base import ReadContext, cleaned_up, is_gone
from vane_dagster.sources.parquet import ParquetReader
from vane_dagster.sources.parquet_scan import passing, reading_detail, scan
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.types.schema import read_schema, schema_record

VACUUM = "VACUUM"
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class RowFilter:
    """A filter of the rows of data files.

    Attributes:
        text: The SQL expression.
        columns: The columns that it names.
    """

    text: str
    columns: pa.Schema


@dataclass(frozen=True)
class LiveRows:
    """The rows at a range of positions in a data file that has deletes or a filter.

    Attributes:
        first: The first position.
        last: The position after the last.
        start: Number of the first row.
        deleted: The deleted positions of the range.
        filter: The filter; None if all rows of the file pass it.
    """

    first: int
    last: int
    start: int
    deleted: Positions
    filter: RowFilter | None

    def detail(self, cast: Sequence[str], constants: Mapping[str, str | None]) -> str:
        """Return the detail of their span.

        Args:
            cast: Names of the columns that have another type in the file.
            constants: Columns that the file lacks, each with its value as text; None for null.
        """
        record: dict[str, Any] = {"positions": [self.first, self.last, self.start]}
        if len(self.deleted):
            bits = np.zeros(self.last - self.first, bool)
            bits[self.deleted - self.first] = True
            packed = zlib.compress(np.packbits(bits).tobytes())
            record["deleted"] = base64.b85encode(packed).decode()
        if self.filter is not None:
            record["filter"] = [self.filter.text, schema_record(self.filter.columns)]
        return reading_detail(cast, constants, **record)

    @classmethod
    def of(cls, span: FileSpan) -> LiveRows | None:
        """Read the detail of a span; None if rows and positions are the same."""
        record = json.loads(span.detail) if span.detail else {}
        if "positions" not in record:
            return None
        first, last, start = record["positions"]
        deleted = np.array([], np.int64)
        if "deleted" in record:
            packed = np.frombuffer(zlib.decompress(base64.b85decode(record["deleted"])), np.uint8)
            deleted = np.flatnonzero(np.unpackbits(packed)) + first
        row_filter = None
        if "filter" in record:
            text, columns = record["filter"]
            row_filter = RowFilter(text, read_schema(columns))
        return cls(first, last, start, deleted, row_filter)

    def mask(self, span: FileSpan, options: Mapping[str, Any], context: ReadContext) -> Mask:
        """Return which positions hold rows: neither deleted nor filtered out.

        Args:
            span: The file, with its detail.
            options: Options of the file's fsspec file system.
            context: Location and DuckDB connection.

        Raises:
            SourceError: If the filter's columns cannot be read.
            SchemaError: If the filter fails for a row.
        """
        live = np.ones(self.last - self.first, bool)
        if self.filter is not None:
            every = dataclasses.replace(span, start=self.first, stop=self.last)
            text, columns = self.filter.text, self.filter.columns
            live[:] = False
            live[passing(every, columns, text, options, context) - self.first] = True
        live[self.deleted - self.first] = False
        return live


@dataclass(frozen=True)
class DeltaReader(ParquetReader):
    """Reads rows of the data files of Delta tables.

    Attributes:
        storage_options: Options of the fsspec file system.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, kw_only=True)

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.storage_options

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read rows as Parquet, without deleted rows and those that do not pass the filter."""
        with self._cleanup_errors(fragment, context.location):
            return pa.concat_tables(self._read(span, schema, context) for span in fragment.spans)

    def project(
        self,
        fragment: FragmentRecord,
        schema: pa.Schema,
        columns: Sequence[tuple[str, str]],
        where: str | None,
        context: ReadContext,
    ) -> pa.Table | None:
        """Push SQL into the scan of files without deletes and filters."""
        if any(LiveRows.of(span) for span in fragment.spans):
            return None
        with self._cleanup_errors(fragment, context.location):
            return super().project(fragment, schema, columns, where, context)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record of a data file, which never changes once it is written."""
        location = Location(file.url, self.storage_options)
        return dataclasses.replace(file, size=int(location.fs.info(location.path)["size"]))

    @contextmanager
    def _cleanup_errors(self, fragment: FragmentRecord, location: str) -> Iterator[None]:
        """Name the cause of an error for a data file that is gone."""
        try:
            yield
        except SourceError as error:
            for span in fragment.spans:
                if is_gone(span.url, self.options_for(span.url)):
                    version = "the version of a Delta table that was planned"
                    raise cleaned_up(span.url, version, VACUUM, location) from error
            raise

    def _read(self, span: FileSpan, schema: pa.Schema, context: ReadContext) -> pa.Table:
        options = self.options_for(span.url)
        live = LiveRows.of(span)
        if live is None:
            return scan(span, schema, options, context)
        every = dataclasses.replace(span, start=live.first, stop=live.last)
        table = scan(every, schema, options, context)
        table = table.filter(pa.array(live.mask(span, options, context)))
        return table.slice(span.start - live.start, span.stop - span.start)
