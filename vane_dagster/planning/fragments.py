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

from vane_dagster import _failpoints
from vane_dagster.errors import SourceError
from vane_dagster.pipeline.source import ParquetSource
from vane_dagster.planning.source_files import file_identity
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.transient_errors import persistently
from vane_dagster.types.schema import check_distinct, plain_type, seen_by_sql

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
            metadata = persistently(_failpoints.failing("read", file.url, read))
            return metadata.schema.to_arrow_schema(), metadata
        except Exception as error:  # of pyarrow, or of a file system's driver
            if file.size and not _begins_as_parquet(location):
                raise SourceError(
                    f"{culprit}: {file.url!r} ({file.size} bytes) is not a Parquet file, and "
                    "vd.parquet reads no other format. Convert it, for example with DuckDB's COPY "
                    "(FROM 'data.csv') TO 'data.parquet' (FORMAT parquet), or with pyarrow, and "
                    "name the Parquet file; or take it out of the source"
                ) from error
            raise SourceError(
                f"{culprit}: {file.url!r} ({file.size} bytes) cannot be read as Parquet: "
                f"{type(error).__name__}: {error}. Write it again, or take it out of the source"
            ) from error

    with ThreadPoolExecutor(max_workers=16) as threads:
        footers = list(threads.map(footer, files))
    schema = plain_schema(footers[0][0])
    for file, (own, _) in zip(files, footers):
        schema = _common(schema, plain_schema(own), files[0].url, file.url, culprit)
    check_distinct(schema.names, f"{culprit}, {files[0].url!r}")
    if ROW_NUMBER in schema.names:
        raise SourceError(
            f"{culprit}: {files[0].url!r} has a column {ROW_NUMBER!r}, which is what the reader "
            "calls a row's place in its file; rename it"
        )
    fragments = []
    for file, (own, metadata) in zip(files, footers):
        fragments += list(cut(file, metadata, rule, _kept_types(plain_schema(own))))
    return SourceTable(schema, tuple(fragments))


def _begins_as_parquet(location: Location) -> bool:
    """Whether a file begins as a Parquet file does; true where that cannot be read."""
    try:
        with location.fs.open(location.path, "rb") as stream:
            return stream.read(4) in (b"PAR1", b"PARE")
    except Exception:  # drivers have exceptions of their own, of many kinds
        return True


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A file's columns, each in the plain encoding of its type."""
    return pa.schema([pa.field(f.name, plain_type(f.type)) for f in schema])


def _common(
    first: pa.Schema, other: pa.Schema, first_url: str, url: str, culprit: str
) -> pa.Schema:
    """The columns of two files, where types differ in the type as which SQL sees both."""
    fields = []
    for field in first:
        index = other.get_field_index(field.name)
        found = other.field(index).type if index >= 0 else "no such column"
        if found != field.type:
            seen = seen_by_sql(field.type)
            if seen is None or index < 0 or seen_by_sql(found) != seen:
                raise SourceError(
                    f"{culprit}: column {field.name!r} is {found} in {url!r}, but {field.type} in "
                    f"{first_url!r}; all files of a partition need the same columns and types"
                )
            field = field.with_type(seen)
        fields.append(field)
    return pa.schema(fields)


def _kept_types(schema: pa.Schema) -> str:
    """The types that are kept although SQL has others for them; none for most files."""
    return "".join(f"\n{f.name}: {f.type}" for f in schema if seen_by_sql(f.type) != f.type)


def cut(
    file: FileRecord, footer: Any, rule: FragmentRule, types: str = ""
) -> Iterator[FragmentRecord]:
    """Cuts a file into fragments along its row groups, and inside those that are too large.

    How many rows a fragment has is told by the file's mean row. Row groups whose rows are much
    larger are cut by their own bytes, at twice the rule's. `types` counts in the digests.
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
        text = f"{identity}\n{start}\n{stop}{types}"
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
