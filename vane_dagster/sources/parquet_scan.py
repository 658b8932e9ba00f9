"""Reads of a Parquet file in a worker, limited to the columns, rows and filter of a task."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._lazy import duckdb, fsspec, pc, pq
from vane_dagster.errors import SourceError
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import ReadContext, unreadable
from vane_dagster.sources.schemas import conform
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import Location, duckdb_path, protocols
from vane_dagster.storage.manifest import FileSpan
from vane_dagster.types.kinds import holds
from vane_dagster.types.schema import seen_by_sql, sql_name
from vane_dagster.types.sql import (
    computed_from,
    expression_error,
    literal,
    passed_through,
    quote,
    select_list,
    unpruned,
    unused,
)
from vane_dagster.types.tensors import unsliced

ROW_NUMBER = "file_row_number"
"""DuckDB's name for a row's position in its file."""


def scan(
    span: FileSpan, schema: pa.Schema, storage_options: Mapping[str, Any], context: ReadContext
) -> pa.Table:
    """Read rows unchanged: by whole row groups if the range allows it, else by DuckDB."""
    table = _FileRows(span, schema, storage_options, context).row_groups(schema.names, whole=True)
    if table is None:
        columns = [(name, quote(name)) for name in schema.names]
        table = scan_projected(span, schema, columns, None, storage_options, context)
    return table.cast(schema)


def scan_projected(
    span: FileSpan,
    schema: pa.Schema,
    columns: Sequence[tuple[str, str]],
    where: str | None,
    storage_options: Mapping[str, Any],
    context: ReadContext,
) -> pa.Table:
    """Compute SQL columns and a filter, pushed into the scan.

    Columns that SQL would change are read separately, and joined to the rows that pass the filter.
    """
    rows = _FileRows(span, schema, storage_options, context)
    passed = passed_through(columns, schema)
    kinds = {name: schema.field(name).type for name in passed.values()}
    kept = [name for name, kind in kinds.items() if seen_by_sql(kind) != kind]
    computed = [(name, e) for name, e in columns if passed.get(name) not in kept]
    place = unused("row", [name for name, _ in columns])
    table = rows.computed([*computed, (place, ROW_NUMBER)] if kept else computed, where)
    if kept and (values := rows.row_groups(kept)) is not None:
        values = values.take(pc.subtract(table.column(place), span.start))
        found = dict(zip(table.column_names, table.columns))
        found |= {n: values.column(c) for n, c in passed.items() if c in kept}
        table = pa.table({name: found[name] for name, _ in columns})
    return table


def check_row_number(names: Sequence[str], owner: str) -> None:
    """Refuse a column with the name of a row's position."""
    if ROW_NUMBER in names:
        raise SourceError(
            f"{owner} has a column {ROW_NUMBER!r}, which is what the reader calls a row's place in "
            "its file; rename it"
        )


@contextmanager
def opened(location: Location) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; pages are verified by their checksums."""
    with location.fs.open(location.path, "rb") as stream:
        local, remote = (location.path, {"memory_map": True}), (stream, {"pre_buffer": True})
        source, options = local if location.is_local else remote
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


def counts(file: pq.ParquetFile) -> list[int]:
    """Return the rows of each row group."""
    footer = file.metadata
    return [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]


def read_rows(file: pq.ParquetFile, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Read columns of some rows with Arrow's Parquet reader, which decodes whole row groups."""
    groups, first, _ = groups_between(counts(file), start, stop)
    table = file.read_row_groups(groups, columns=columns, use_threads=False)
    return table.select(columns).slice(start - first, stop - start)


def groups_between(counts: Iterable[int], start: int, stop: int) -> tuple[list[int], int, int]:
    """Return the row groups that overlap a range, their first row, and the row after their last."""
    edges = np.cumsum([0, *counts])
    groups = np.flatnonzero((edges[:-1] < stop) & (edges[1:] > start)).tolist()
    if not groups:
        return [], start, start
    return groups, int(edges[groups[0]]), int(edges[groups[-1] + 1])


class _FileRows:
    """Rows of a file."""

    def __init__(
        self,
        span: FileSpan,
        schema: pa.Schema,
        storage_options: Mapping[str, Any],
        context: ReadContext,
    ) -> None:
        detail = json.loads(span.detail) if span.detail else {}
        self.cast, self.constants = detail.get("cast", ()), detail.get("constants", {})
        self.span, self.schema, self.context = span, schema, context
        self.place = Location(span.url, storage_options)

    def row_groups(self, columns: Sequence[str], whole: bool = False) -> pa.Table | None:
        """Read columns with Arrow's Parquet reader; None for a part of a row group."""
        start, stop = self.span.start, self.span.stop

        def read() -> pa.Table | None:
            with opened(self.place) as file:
                if whole and groups_between(counts(file), start, stop)[1:] != (start, stop):
                    return None
                present = [name for name in columns if name not in self.constants]
                table = read_rows(file, start, stop, present)
                fields = pa.schema([self.schema.field(name) for name in columns])
                return conform(unsliced(table), fields, self.constants)

        try:
            return with_retries(_failpoints.failing("read", self.span.url, read))
        except Exception as error:  # drivers raise their own exception classes
            raise self.unreadable(error) from error

    def computed(self, columns: Sequence[tuple[str, str]], where: str | None) -> pa.Table:
        """Compute expressions over the rows that pass a filter.

        An error is attributed to the file if its columns cannot be read without SQL either, else to
        the SQL.
        """
        read = computed_from(columns, where, self.schema)

        def run(columns: Sequence[tuple[str, str]], where: str | None) -> pa.Table:
            return self._asked(select_list(columns), where, read)

        try:
            return run(columns, where)
        except (duckdb.IOException, OSError) as error:
            raise self.unreadable(error) from error
        except duckdb.Error as error:
            try:
                self._asked(", ".join(quote(name) for name in read) or ROW_NUMBER, None, ())
            except (duckdb.Error, OSError) as damage:
                raise self.unreadable(damage) from damage
            raise expression_error(columns, where, run, error, self.context.location) from error

    def unreadable(self, error: Exception) -> SourceError:
        """Return the error for a file that cannot be read."""
        damaged = is_damage(error) or isinstance(error, duckdb.Error)
        fix = "Write it again, or take it out of the source" if damaged else None
        return unreadable(self.span.url, error, self.context.location, fix)

    def _asked(self, listed: str, where: str | None, computed: Collection[str]) -> pa.Table:
        query = (
            f"SELECT {listed} FROM {self._table(computed)} AS source "
            f"WHERE {ROW_NUMBER} >= {self.span.start} AND {ROW_NUMBER} < {self.span.stop}"
        )
        query += f" AND ({where})" if where else ""

        def read() -> pa.Table:
            return self.context.connect().sql(query).to_arrow_table()

        return with_retries(_failpoints.failing("read", self.span.url, read))

    def _table(self, computed: Collection[str]) -> str:
        """Return the file in SQL, with the columns that it lacks, and others cast.

        Casts are of columns whose type in SQL is not the one that the file declares.
        """
        if not self.place.is_local:
            _register(self.place.fs, self.context.connect())
        casts, constants = [], ""
        for column in self.schema:
            if (seen := seen_by_sql(column.type)) is None:
                continue
            name, kind = quote(column.name), sql_name(seen)
            if column.name in self.constants:
                text = self.constants[column.name]
                value = "NULL" if text is None else literal(text)
                constants += f", {f'{value}::{kind}' if kind else value} AS {name}"
            else:
                read = unpruned(column.name, seen) if column.name in computed else name
                has_sizes = holds(seen, pa.types.is_fixed_size_list)  # which Parquet does not have
                if kind and (seen != column.type or has_sizes or column.name in self.cast):
                    read = f"{read}::{kind}"
                if read != name:
                    casts.append(f"{read} AS {name}")
        # Names of folders, such as day=2026-01-01, are no columns.
        options = f"{ROW_NUMBER}=true, hive_partitioning=false"
        file = f"read_parquet({literal(duckdb_path(self.place.fs, self.place.path))}, {options})"
        if not casts and not constants:
            return file
        replaced = f" REPLACE ({', '.join(casts)})" if casts else ""
        return f"(SELECT *{replaced}{constants} FROM {file})"


_registered: dict[str, fsspec.AbstractFileSystem] = {}
_registering = threading.Lock()


def _register(fs: fsspec.AbstractFileSystem, opened: duckdb.DuckDBPyConnection) -> None:
    """Make DuckDB read through this file system, instead of an earlier one of its protocol."""
    names = protocols(fs)
    with _registering:
        if all(_registered.get(name) is fs for name in names):
            return
        for name in names:
            _registered[name] = fs
            if opened.filesystem_is_registered(name):
                opened.unregister_filesystem(name)
        opened.register_filesystem(fs)
