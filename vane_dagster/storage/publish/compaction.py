"""Compaction: parts merged or split into files of a target size, a few rows in memory at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._lazy import pq
from vane_dagster._private_folder import temporary_folder
from vane_dagster.storage.filesystem import Location, beside
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.storage.part_file import id_range, repetitive

_WRITERS = 4
_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 1 << 20
_BATCH_BYTES = 8 << 20


@dataclass(frozen=True)
class CompactionGroup:
    """Consecutive parts, and the number of files with equally many rows to make of them."""

    parts: tuple[PartInfo, ...]
    count: int

    @property
    def rows(self) -> int:
        """Rows of the parts."""
        return sum(part.rows for part in self.parts)

    @property
    def stems(self) -> list[str]:
        """The names of the files without a suffix; equal for the same parts and number of files."""
        state = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            state.update(f"{part.name}\n".encode())
        return [f"{state.hexdigest()}-{i + 1}-of-{self.count}" for i in range(self.count)]

    def bounds(self) -> list[int]:
        """Return the number of rows up to the end of each file."""
        return [self.rows * (i + 1) // self.count for i in range(self.count)]


@dataclass(frozen=True)
class CompactedFile:
    """A file that was written: size in bytes, rows, and range of the ids."""

    size: int
    rows: int
    id_min: Any
    id_max: Any


def plan_compaction(parts: Iterable[PartInfo], target_bytes: int) -> list[CompactionGroup]:
    """Group parts, in their order, for files of about `target_bytes`."""
    found: list[CompactionGroup] = []
    current: list[PartInfo] = []
    size = 0
    for part in parts:
        # One more part would exceed the target by more than the group falls short of it.
        if current and size + part.bytes - target_bytes > target_bytes - size:
            found.append(_bundle(current, size, target_bytes))
            current, size = [], 0
        current.append(part)
        size += part.bytes
    return [*found, _bundle(current, size, target_bytes)] if current else found


def _bundle(parts: Sequence[PartInfo], size: int, target_bytes: int) -> CompactionGroup:
    rows = sum(part.rows for part in parts)
    return CompactionGroup(tuple(parts), max(1, min(rows, round(size / target_bytes))))


def write_compacted(
    wanted: Iterable[tuple[CompactionGroup, Sequence[str]]],
    staging: Location,
    target: Location,
    schema: pa.Schema,
    id: str,
    compression: str,
) -> dict[str, CompactedFile]:
    """Write the files of groups atomically, a few groups in parallel."""

    def write(item: tuple[CompactionGroup, Sequence[str]]) -> list[CompactedFile]:
        bundle, names = item
        rows = _Rows(staged_rows(bundle, staging, schema))
        made = []
        start = 0
        with contextlib.closing(rows):
            for name, stop in zip(names, bundle.bounds()):
                with _file(target, name) as path:
                    found = _write(rows, stop - start, path, schema, id, compression)
                made.append(found)
                start = stop
        return made

    listed = list(wanted)
    with ThreadPoolExecutor(max_workers=_WRITERS) as threads:
        done = list(threads.map(write, listed))
    return {
        name: made for (_, names), found in zip(listed, done) for name, made in zip(names, found)
    }


class _Rows:
    """A stream of small tables that returns any number of rows at a time."""

    def __init__(self, tables: Generator[pa.Table, None, None]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None
        self.close = tables.close

    def take(self, most: int) -> pa.Table:
        """Return the next rows, at least one and at most `most`."""
        table = self._rest if self._rest is not None else next(self._tables)
        self._rest = table.slice(most) if table.num_rows > most else None
        return table.slice(0, most)


def staged_rows(
    bundle: CompactionGroup, staging: Location, schema: pa.Schema
) -> Generator[pa.Table, None, None]:
    """Yield the rows of the parts of a group, in tables of about 8 MiB."""
    for part in bundle.parts:
        with staging.fs.open(staging.file(part.name), "rb") as opened:
            file = pq.ParquetFile(
                opened, pre_buffer=not staging.is_local, page_checksum_verification=True
            )
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            size = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=1)
            most = max(1, min(_GROUP_ROWS, _BATCH_BYTES // max(1, size)))
            for batch in file.iter_batches(batch_size=most):
                table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                if table.num_rows:
                    yield table.cast(schema)


def _write(
    rows: _Rows,
    count: int,
    path: str,
    schema: pa.Schema,
    id: str,
    compression: str,
) -> CompactedFile:
    """Write the next `count` rows to a local file, in row groups of a bounded size."""
    lows, highs = [], []
    left = count
    with contextlib.ExitStack() as opened:
        writer = None
        while writer is None or left:  # a file of no rows has its columns
            tables: list[pa.Table] = []
            size = held = 0
            while left and size < _GROUP_BYTES and held < _GROUP_ROWS:
                tables.append(rows.take(left))
                size += tables[-1].nbytes
                held += tables[-1].num_rows
                left -= tables[-1].num_rows
            group = pa.concat_tables([schema.empty_table(), *tables])
            if writer is None:
                options = {"compression": compression, "use_dictionary": [*repetitive(group)]}
                writer = opened.enter_context(pq.ParquetWriter(path, schema, **options))
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            low, high = id_range(group.column(id))
            lows.append(low)
            highs.append(high)
    return CompactedFile(
        os.path.getsize(path), count, min(lows, default=None), max(highs, default=None)
    )


@contextlib.contextmanager
def _file(target: Location, name: str) -> Iterator[str]:
    """Yield a local path to write to, and move the file to its target afterwards."""
    if not target.is_local:
        with temporary_folder() as folder:
            path = os.path.join(folder, "file.parquet")
            yield path
            target.put(name, path)
        return
    _failpoints.at_storage("write", target.file_url(name))
    with beside(target.file(name)) as path:
        yield path
        with open(path, "rb") as written:
            os.fsync(written.fileno())
        os.replace(path, target.file(name))
