"""Reads of rows of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._lazy import pq
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import unreadable
from vane_dagster.sources.schemas import conform
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileSpan
from vane_dagster.storage.packed_tensors import schema_of_rows, unpacked
from vane_dagster.types.tensors import unsliced


def scan(
    span: FileSpan,
    schema: pa.Schema,
    storage_options: Mapping[str, Any],
    location: str,
    constants: Mapping[str, str | None] = {},
) -> pa.Table:
    """Read rows; columns that the file lacks are constant or null."""
    place = StoragePath(span.url, storage_options)

    columns = [name for name in schema.names if name not in constants]
    try:
        rows = read_rows(place, span.start, span.stop, columns)
        rows = unpacked(rows, schema_of_rows(rows.schema))
        return conform(unsliced(rows), schema, constants)
    except Exception as error:  # drivers raise their own exception classes
        fix = "Write it again, or take it out of the source" if is_damage(error) else None
        raise unreadable(span.url, error, location, fix) from error


@contextmanager
def opened(file: StoragePath) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; pages are verified by their checksums."""
    with file.fs.open(file.path, "rb") as stream:
        local, remote = (file.path, {"memory_map": True}), (stream, {"pre_buffer": True})
        source, options = local if file.is_local else remote
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


def read_rows(place: StoragePath, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Read some rows of a file, with the requested columns that it has."""

    def read() -> pa.Table:
        with opened(place) as file:
            kinds = file.schema_arrow
            present = [name for name in columns if name in kinds.names]
            record_batches = list(batches(file, start, stop, present))
            own = None if record_batches else pa.schema([kinds.field(name) for name in present])
            return pa.Table.from_batches(record_batches, own).select(present)

    return with_retries(_failpoints.failing("read", place.url, read))


def batches(
    file: pq.ParquetFile, start: int, stop: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read columns of some rows; a row group is decoded from its beginning, batch by batch.

    A batch has as many rows as are read, so that most of these are not in pieces.
    """
    footer = file.metadata
    counts = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    edges = np.cumsum([0, *counts])
    groups = np.flatnonzero((edges[:-1] < stop) & (edges[1:] > start)).tolist()
    at = int(edges[groups[0]]) if groups else stop
    size = max(1 << 16, stop - start)
    for batch in file.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
        first, last = max(0, start - at), min(batch.num_rows, stop - at)
        if first < last:
            yield batch.slice(first, last - first)
        at += batch.num_rows
        if at >= stop:
            break
