"""Fragments: ranges of rows of one source file, the same from run to run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster import failpoints
from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import FileRecord, FragmentRecord
from vane_dagster.commit.transient import persistently
from vane_dagster.declare.schema import check_distinct, plain_type
from vane_dagster.declare.source import ParquetSource
from vane_dagster.errors import SourceError
from vane_dagster.plan.source import file_identity

_BATCHES_A_FRAGMENT = 64
_DEFAULT_ROWS = 131_072
_LEAST_ROWS = 1_024
_MOST_BYTES = 64 << 20

ROW_NUMBER = "file_row_number"
"""What DuckDB calls a row's place in its file."""


@dataclass(frozen=True)
class FragmentRule:
    """How files are cut into fragments.

    Attributes:
        rows: Rows of a fragment, at most.
        bytes: Uncompressed bytes of a fragment over all columns, at most, by the file's footer.
    """

    rows: int
    bytes: int = _MOST_BYTES

    def __str__(self) -> str:
        return f"at most {self.rows:,} rows and {self.bytes / (1 << 20):g} MiB"


def default_rule(batch_sizes: Sequence[int]) -> FragmentRule:
    """Enough batches a fragment to keep workers busy, few enough to lose little: 64 or so."""
    if not batch_sizes:
        return FragmentRule(_DEFAULT_ROWS)
    rows = _BATCHES_A_FRAGMENT * (1 << (min(batch_sizes) - 1).bit_length())
    return FragmentRule(max(_LEAST_ROWS, min(rows, 1 << 20)))


@dataclass(frozen=True)
class SourceTable:
    """What the footers of a partition's files tell.

    Attributes:
        schema: Schema of the rows.
        fragments: The files cut up, in order of file and row.
    """

    schema: pa.Schema
    fragments: tuple[FragmentRecord, ...]


def read_footers(
    files: Sequence[FileRecord], source: ParquetSource, rule: FragmentRule, culprit: str
) -> SourceTable:
    """Reads the files' footers and cuts the files into fragments.

    Raises:
        SourceError: If a file is not Parquet, or its columns differ from the first file's.
    """

    def footer(file: FileRecord) -> tuple[pa.Schema, pq.FileMetaData]:
        location = Location(file.url, source.storage_options)

        def read() -> pq.FileMetaData:
            with location.fs.open(location.path, "rb") as stream:
                return pq.read_metadata(stream)

        try:
            metadata = persistently(failpoints.failing("read", file.url, read))
            return metadata.schema.to_arrow_schema(), metadata
        except Exception as error:  # of pyarrow, or of a file system's driver
            raise SourceError(
                f"{culprit}: {file.url!r} ({file.size} bytes) cannot be read as Parquet: "
                f"{type(error).__name__}: {error}. Write it again, or take it out of the source"
            ) from error

    with ThreadPoolExecutor(max_workers=16) as threads:
        footers = list(threads.map(footer, files))
    schema = as_read(footers[0][0])
    check_distinct(schema.names, f"{culprit}, {files[0].url!r}")
    if ROW_NUMBER in schema.names:
        raise SourceError(
            f"{culprit}: {files[0].url!r} has a column {ROW_NUMBER!r}, which is what the reader "
            "calls a row's place in its file; rename it"
        )
    fragments = []
    for file, (own, metadata) in zip(files, footers):
        _check_same_columns(schema, as_read(own), files[0].url, file.url, culprit)
        fragments += list(cut(file, metadata, rule))
    return SourceTable(schema, tuple(fragments))


def as_read(schema: pa.Schema) -> pa.Schema:
    """The schema as DuckDB reads the file, which has fewer types than Arrow."""
    return pa.schema([pa.field(f.name, _read_type(plain_type(f.type))) for f in schema])


def _read_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal256(kind):
        return pa.float64()
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_time32(kind):
        return pa.time64("us")
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("ns" if kind.unit == "ns" else "us", "UTC" if kind.tz else None)
    return kind


def _check_same_columns(
    first: pa.Schema, other: pa.Schema, first_url: str, url: str, culprit: str
) -> None:
    for field in first:
        index = other.get_field_index(field.name)
        found = other.field(index).type if index >= 0 else "no such column"
        if found != field.type:
            raise SourceError(
                f"{culprit}: column {field.name!r} is {found} in {url!r}, but {field.type} in "
                f"{first_url!r}; all files of a partition need the same columns and types"
            )


def cut(file: FileRecord, footer: Any, rule: FragmentRule) -> Iterator[FragmentRecord]:
    """Cuts a file into fragments along its row groups, and inside those that are too large.

    How many rows a fragment has is told by the file's mean row. Row groups whose rows are much
    larger are cut by their own bytes, at twice the rule's.
    """
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    rows, sizes = [g.num_rows for g in groups], [g.total_byte_size for g in groups]
    if not sum(rows):
        return
    row_bytes = max(1.0, sum(sizes) / sum(rows))
    most = max(1, min(rule.rows, int(rule.bytes / row_bytes)))
    identity = file_identity(file)
    edges, above = np.cumsum([0, *rows]), np.cumsum([0, *sizes])
    for start, stop in _ranges(rows, most, sizes, 2 * rule.bytes):
        first, last = np.interp([start, stop], edges, above)
        text = f"{identity}\n{start}\n{stop}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        yield FragmentRecord(file.url, start, stop, digest, int(last - first))


def _ranges(
    groups: Sequence[int], most: int, sizes: Sequence[int], most_bytes: int
) -> Iterator[tuple[int, int]]:
    """Row ranges of at most `most` rows that end where row groups do, where they can.

    Of more than `most_bytes` only where the rows of a row group differ, or a row has more.
    """
    start = end = held = 0
    for rows, size in zip(groups, sizes):
        if end > start and (end + rows - start > most or held + size > most_bytes):
            yield start, end
            start, held = end, 0
        end, held = end + rows, held + size
        pieces = max(-(-(end - start) // most), min(end - start, -(-held // most_bytes)))
        if pieces > 1:
            edges = [start + (end - start) * i // pieces for i in range(pieces + 1)]
            yield from itertools.pairwise(edges)
            start, held = end, 0
    if end > start:
        yield start, end
