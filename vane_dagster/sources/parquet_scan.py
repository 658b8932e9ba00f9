"""Reads of rows of a Parquet file: whole row groups by Arrow, parts of them by DuckDB."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._lazy import duckdb, fsspec, pq
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import ReadContext, unreadable
from vane_dagster.sources.schemas import conform
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import Location, duckdb_path, protocols
from vane_dagster.storage.manifest import FileSpan
from vane_dagster.types.schema import seen_by_sql, sql_name
from vane_dagster.types.sql import literal, quote
from vane_dagster.types.tensors import unsliced

_ROW_NUMBER = "file_row_number"
"""DuckDB's name for a row's position in its file."""


def scan(
    span: FileSpan,
    schema: pa.Schema,
    storage_options: Mapping[str, Any],
    context: ReadContext,
    constants: Mapping[str, str | None] = {},
) -> pa.Table:
    """Read rows; columns that the file lacks are constant or null."""
    place = Location(span.url, storage_options)

    def read() -> pa.Table:
        with opened(place) as file:
            own = file.schema_arrow.names
            present = [each for each in schema if each.name in own and each.name not in constants]
            rows = groups_between(file, span.start, span.stop)[1:]
            is_whole = rows == (span.start, span.stop) or _ROW_NUMBER in map(str.lower, own)
            by_sql = [] if is_whole else [each for each in present if _is_kept_by_sql(each.type)]
            others = [each.name for each in present if each not in by_sql]
            table = read_rows(file, span.start, span.stop, others)
        if by_sql:
            found = _part_of_group(place, span, by_sql, context)
            for name in found.column_names:
                table = table.append_column(name, found.column(name))
        return conform(unsliced(table), schema, constants)

    try:
        return with_retries(_failpoints.failing("read", span.url, read))
    except Exception as error:  # drivers raise their own exception classes
        damaged = is_damage(error) or isinstance(error, duckdb.Error)
        fix = "Write it again, or take it out of the source" if damaged else None
        raise unreadable(span.url, error, context.location, fix) from error


def _is_kept_by_sql(kind: pa.DataType) -> bool:
    return seen_by_sql(kind) == kind and sql_name(kind) is not None


def _part_of_group(
    place: Location, span: FileSpan, columns: Sequence[pa.Field], context: ReadContext
) -> pa.Table:
    """Read rows by DuckDB, which decodes little more than these."""
    if not place.is_local:
        _register(place.fs, context.connect())
    names = [(quote(each.name), sql_name(each.type)) for each in columns]
    listed = ", ".join(f"{name}::{kind} AS {name}" for name, kind in names)
    file = literal(duckdb_path(place.fs, place.path))
    # Names of folders, such as day=2026-01-01, are no columns.
    query = (
        f"SELECT {listed} FROM read_parquet({file}, {_ROW_NUMBER}=true, hive_partitioning=false) "
        f"WHERE {_ROW_NUMBER} >= {span.start} AND {_ROW_NUMBER} < {span.stop}"
    )
    return context.connect().sql(query).to_arrow_table()


@contextmanager
def opened(location: Location) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; pages are verified by their checksums."""
    with location.fs.open(location.path, "rb") as stream:
        local, remote = (location.path, {"memory_map": True}), (stream, {"pre_buffer": True})
        source, options = local if location.is_local else remote
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


def read_rows(file: pq.ParquetFile, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Read columns of some rows with Arrow's Parquet reader, which decodes whole row groups."""
    groups, first, _ = groups_between(file, start, stop)
    table = file.read_row_groups(groups, columns=columns, use_threads=False)
    return table.select(columns).slice(start - first, stop - start)


def groups_between(file: pq.ParquetFile, start: int, stop: int) -> tuple[list[int], int, int]:
    """Return the row groups that overlap a range, their first row, and the row after their last."""
    footer = file.metadata
    counts = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    edges = np.cumsum([0, *counts])
    groups = np.flatnonzero((edges[:-1] < stop) & (edges[1:] > start)).tolist()
    if not groups:
        return [], start, start
    return groups, int(edges[groups[0]]), int(edges[groups[-1] + 1])


_registered: dict[str, fsspec.AbstractFileSystem] = {}
_registering = threading.Lock()


def _register(fs: fsspec.AbstractFileSystem, opened: duckdb.DuckDBPyConnection) -> None:
    """Make DuckDB read through this file system, instead of an earlier one of its protocol."""
    names = protocols(fs)
    with _registering:
        if all(_registered.get(name) is fs for name in names):
            return
        former = [_registered[name] for name in names if name in _registered]
        for name in {name for each in former for name in protocols(each)}:
            _registered.pop(name, None)
            if opened.filesystem_is_registered(name):
                opened.unregister_filesystem(name)
        opened.register_filesystem(fs)
        _registered.update(dict.fromkeys(names, fs))
