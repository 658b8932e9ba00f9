"""Compaction: parts merged into files of a target size, a few rows in memory at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._lazy import pq
from vane_dagster._private_folder import temporary_folder
from vane_dagster.storage.damage import damaged, is_damage
from vane_dagster.storage.filesystem import StoragePath, beside
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.storage.part_file import DICTIONARY_BYTES
from vane_dagster.types.casts import cast_table

_WRITERS = 4
_SLOTS = threading.BoundedSemaphore(_WRITERS)
"""Bounds the memory and the temporary files of publications that run at the same time."""
_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 1 << 20
_BATCH_BYTES = 8 << 20


Parts = tuple[PartInfo, ...]
"""Consecutive parts that one file is made of."""


class PlacedFile(NamedTuple):
    """A file in the folder of a table: its size in bytes, and the parts that it is made of."""

    size: int
    parts: Parts


def plan_compaction(parts: Iterable[PartInfo], target_bytes: int | None) -> dict[str, Parts]:
    """Group parts, in their order, for files of about `target_bytes`; None: a file for each.

    Return the parts of each file by its name without a suffix, which is equal for the same parts.
    """
    if target_bytes is None:
        return {part.stem: (part,) for part in parts}
    groups: list[Parts] = []
    size = 0
    for part in parts:
        # One more part would exceed the target by more than the group falls short of it.
        if groups and size + part.bytes - target_bytes <= target_bytes - size:
            groups[-1] = (*groups[-1], part)
            size += part.bytes
        else:
            groups.append((part,))
            size = part.bytes
    return {_stem(group): group for group in groups}


def _stem(parts: Parts) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(f"{part.name}\n".encode())
    return f"{state.hexdigest()}-1-of-1"  # tells it from a part's name, in a folder of both


def write_compacted(
    wanted: Mapping[str, Parts],
    staging: StoragePath,
    target: StoragePath,
    schema: pa.Schema,
    compression: str,
) -> dict[str, PlacedFile]:
    """Write files atomically, a few in parallel; the names of the files are keys of `wanted`."""

    def write(name: str) -> PlacedFile:
        with _SLOTS, _file(target, name) as path:
            _write(staged_rows(wanted[name], staging, schema), path, schema, compression)
            return PlacedFile(os.path.getsize(path), wanted[name])

    with ThreadPoolExecutor(max_workers=_WRITERS) as threads:
        return dict(zip(wanted, threads.map(write, wanted)))


def staged_rows(parts: Parts, staging: StoragePath, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of parts, in tables of about 8 MiB; raise DamagedPartError."""
    for part in parts:
        try:
            yield from _part_rows(part, staging, schema)
        except Exception as error:
            if is_damage(error):
                raise damaged(staging, part.name, error) from error
            raise


def _part_rows(part: PartInfo, staging: StoragePath, schema: pa.Schema) -> Iterator[pa.Table]:
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
                yield cast_table(table, schema)


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Combine tables into row groups of a bounded size."""
    held: list[pa.Table] = []
    size = rows = 0
    for table in tables:
        held.append(table)
        size += table.nbytes
        rows += table.num_rows
        if size >= _GROUP_BYTES or rows >= _GROUP_ROWS:
            yield pa.concat_tables(held)
            held, size, rows = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _write(tables: Iterable[pa.Table], path: str, schema: pa.Schema, compression: str) -> None:
    """Write rows to a local file, in row groups of a bounded size."""
    options = {"compression": compression, "dictionary_pagesize_limit": DICTIONARY_BYTES}
    with pq.ParquetWriter(path, schema, **options) as writer:
        for group in _row_groups(tables):
            writer.write_table(group, row_group_size=max(1, group.num_rows))


@contextlib.contextmanager
def _file(target: StoragePath, name: str) -> Iterator[str]:
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
