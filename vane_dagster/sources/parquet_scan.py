"""Reads of a Parquet file in a worker, limited to the columns, rows and filter of a task."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vane_dagster import _failpoints
from vane_dagster.errors import SourceError
from vane_dagster.sources.base import ReadContext, unreadable
from vane_dagster.sources.schemas import conform
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import Location, duckdb_path, protocols
from vane_dagster.storage.manifest import FileSpan
from vane_dagster.storage.transient_errors import with_retries
from vane_dagster.types.schema import seen_by_sql, sql_name
from vane_dagster.types.sql import (
    computed_from,
    expression_error,
    literal,
    passed_through,
    quote,
    select_list,
    unused,
)
from vane_dagster.types.tensors import unsliced

_ROW = "file_row_number"


@dataclass(frozen=True)
class _FileRows:
    """Rows `start` to `stop` of a file.

    Attributes:
        url: The file.
        start: First row.
        stop: Row after the last.
        schema: The columns to read.
        storage_options: Options of the fsspec file system.
        cast: Names of columns that have another type in the file.
        constants: Columns that the file lacks, each with its value as text; None for null.
    """

    url: str
    start: int
    stop: int
    schema: pa.Schema
    storage_options: Mapping[str, Any] = field(repr=False)
    cast: Collection[str] = ()
    constants: Mapping[str, str | None] = field(default_factory=dict)


def reading_detail(cast: Collection[str], constants: Mapping[str, str | None], **more: Any) -> str:
    """Return the detail of a file's spans, as JSON; empty for a file that is read as it is.

    Args:
        cast: Names of the columns that have another type in the file.
        constants: Columns that the file lacks, each with its value as text; None for null.
        **more: Further entries, for another reader.
    """
    record = {"cast": list(cast), "constants": constants, **more}
    record = {name: value for name, value in record.items() if value}
    return json.dumps(record) if record else ""


def _file_rows(span: FileSpan, schema: pa.Schema, storage_options: Mapping[str, Any]) -> _FileRows:
    record = json.loads(span.detail) if span.detail else {}
    columns = (record.get("cast", ()), record.get("constants", {}))
    return _FileRows(span.url, span.start, span.stop, schema, storage_options, *columns)


def scan(
    span: FileSpan, schema: pa.Schema, storage_options: Mapping[str, Any], context: ReadContext
) -> pa.Table:
    """Read rows unchanged: by whole row groups if the range allows it, else by DuckDB.

    Args:
        span: The rows.
        schema: The columns.
        storage_options: Options of the file's fsspec file system.
        context: Location and DuckDB connection.

    Raises:
        SourceError: If they cannot be read.
    """
    rows = _file_rows(span, schema, storage_options)
    kept = _kept_out_of_sql(rows.schema.names, rows)
    table = _read_row_groups(rows, kept, context)
    if others := [name for name in rows.schema.names if name not in table.column_names]:
        read = _query(rows, ", ".join(quote(name) for name in others), context)
        columns = [*zip(others, read.columns), *zip(table.column_names, table.columns)]
        table = pa.table(dict(columns))
    return table.select(rows.schema.names).cast(rows.schema)


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

    Args:
        span: The rows.
        schema: The columns that the expressions use.
        columns: Output columns and their expressions.
        where: The filter, if there is one.
        storage_options: Options of the file's fsspec file system.
        context: Location and DuckDB connection.

    Raises:
        SourceError: If they cannot be read.
        SchemaError: If an expression fails for a row.
    """
    rows = _file_rows(span, schema, storage_options)
    passed = passed_through(columns, rows.schema)
    kept = _kept_out_of_sql(passed.values(), rows)
    computed = [(name, e) for name, e in columns if passed.get(name) not in kept]
    place = unused("row", [name for name, _ in columns])
    table = _computed([*computed, (place, _ROW)] if kept else computed, where, rows, context)
    if kept:
        values = _read_row_groups(rows, kept, context, whole=False)
        values = values.take(pc.subtract(table.column(place), rows.start))
        found = dict(zip(table.column_names, table.columns))
        found |= {n: values.column(c) for n, c in passed.items() if c in kept}
        table = pa.table({name: found[name] for name, _ in columns})
    return table


def _kept_out_of_sql(names: Iterable[str], rows: _FileRows) -> list[str]:
    """Return the columns with types that SQL would change."""
    kinds = {name: rows.schema.field(name).type for name in names}
    return [name for name, kind in kinds.items() if seen_by_sql(kind) != kind]


def _read_row_groups(
    rows: _FileRows, columns: Sequence[str], context: ReadContext, whole: bool = True
) -> pa.Table:
    """Read columns with Arrow's Parquet reader, which decodes whole row groups.

    With `whole`, read all columns if the range consists of whole row groups.
    """
    location = Location(rows.url, rows.storage_options)

    def read() -> pa.Table:
        with opened(location) as file:
            groups, first, stop = row_groups(file.metadata, rows.start, rows.stop)
            aligned = whole and (first, stop) == (rows.start, rows.stop)
            wanted = rows.schema.names if aligned else list(columns)
            if not wanted:
                return pa.table({})
            present = [name for name in wanted if name not in rows.constants]
            table = file.read_row_groups(groups, columns=present, use_threads=False)
            table = table.select(present).slice(rows.start - first, rows.stop - rows.start)
            count = table.num_rows if present else max(0, min(rows.stop, stop) - rows.start)
            fields = [rows.schema.field(name) for name in wanted]
            return _with_constants(conform(unsliced(table), pa.schema(fields), count), rows)

    try:
        return with_retries(_failpoints.failing("read", rows.url, read))
    except Exception as error:  # drivers raise their own exception classes
        raise _unreadable(rows, context, error) from error


def _with_constants(table: pa.Table, rows: _FileRows) -> pa.Table:
    """Fill the columns that a file lacks, and that are not null."""
    for index, column in enumerate(table.schema):
        text = rows.constants.get(column.name)
        if text is not None:
            value = pa.array([text]).cast(column.type)[0]
            table = table.set_column(index, column, pa.repeat(value, table.num_rows))
    return table


@contextmanager
def opened(location: Location) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; pages are verified by their checksums."""
    with location.fs.open(location.path, "rb") as stream:
        local, remote = (location.path, {"memory_map": True}), (stream, {"pre_buffer": True})
        source, options = local if location.is_local else remote
        with pq.ParquetFile(source, page_checksum_verification=True, **options) as file:
            yield file


def row_groups(footer: pq.FileMetaData, start: int, stop: int) -> tuple[list[int], int, int]:
    """Return the row groups that overlap a range, their first row, and the row after their last."""
    edges = [0]
    for index in range(footer.num_row_groups):
        edges.append(edges[-1] + footer.row_group(index).num_rows)
    spans = list(enumerate(itertools.pairwise(edges)))
    reached = [(i, a, b) for i, (a, b) in spans if a < stop and b > start]
    if not reached:
        return [], start, start
    return [i for i, _, _ in reached], reached[0][1], reached[-1][2]


def _computed(
    columns: Sequence[tuple[str, str]], where: str | None, rows: _FileRows, context: ReadContext
) -> pa.Table:
    """Compute expressions over the rows that pass a filter.

    An error is attributed to the file if its columns cannot be read without SQL either, else to the
    SQL.
    """

    def run(columns: Sequence[tuple[str, str]], where: str | None) -> pa.Table:
        return _asked(rows, select_list(columns), where, context)

    try:
        return run(columns, where)
    except (duckdb.IOException, OSError) as error:
        raise _unreadable(rows, context, error) from error
    except duckdb.Error as error:
        read = computed_from(columns, where, rows.schema)
        _query(rows, ", ".join(quote(name) for name in read) or _ROW, context)
        raise expression_error(columns, where, run, error, context.location) from error


def _query(rows: _FileRows, listed: str, context: ReadContext) -> pa.Table:
    try:
        return _asked(rows, listed, None, context)
    except (duckdb.Error, OSError) as error:
        raise _unreadable(rows, context, error) from error


def _asked(rows: _FileRows, listed: str, where: str | None, context: ReadContext) -> pa.Table:
    # Names of folders, as day=2026-01-01, are no columns.
    options = f"{_ROW}=true, hive_partitioning=false"
    table = f"read_parquet({literal(_duckdb_path(rows, context))}, {options})"
    casts, constants = _casts(rows), _constants(rows)
    if casts or constants:
        replaced = f" REPLACE ({casts})" if casts else ""
        table = f"(SELECT *{replaced}{constants} FROM {table})"
    query = (
        f"SELECT {listed} FROM {table} AS source "
        f"WHERE {_ROW} >= {rows.start} AND {_ROW} < {rows.stop}"
    )
    query += f" AND ({where})" if where else ""

    def read() -> pa.Table:
        return context.connect().sql(query).to_arrow_table()

    return with_retries(_failpoints.failing("read", rows.url, read))


def _casts(rows: _FileRows) -> str:
    """Return casts of columns whose type in SQL is not the one that the file declares."""
    present = [field for field in rows.schema if field.name not in rows.constants]
    seen = [(field.name, field.type, seen_by_sql(field.type)) for field in present]
    kinds = [
        (name, sql_name(s)) for name, kind, s in seen
        if s is not None and (s != kind or _has_sizes(s) or name in rows.cast)
    ]  # fmt: skip
    return ", ".join(f"{quote(name)}::{kind} AS {quote(name)}" for name, kind in kinds if kind)


def _constants(rows: _FileRows) -> str:
    """Return the columns that the file lacks, as further columns of a SELECT."""
    found = ""
    for name, text in rows.constants.items():
        seen = seen_by_sql(rows.schema.field(name).type) if name in rows.schema.names else None
        if seen is not None:
            value, kind = "NULL" if text is None else literal(text), sql_name(seen)
            found += f", {f'{value}::{kind}' if kind else value} AS {quote(name)}"
    return found


def _has_sizes(kind: pa.DataType) -> bool:
    """Return whether a type contains fixed-size lists, which Parquet does not have."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_fixed_size_list(kind) or any(_has_sizes(child) for child in inner)


def _unreadable(rows: _FileRows, context: ReadContext, error: Exception) -> SourceError:
    damaged = is_damage(error) or isinstance(error, duckdb.Error)
    fix = "Write it again, or take it out of the source" if damaged else None
    return unreadable(rows.url, error, context.location, fix)


def _duckdb_path(rows: _FileRows, context: ReadContext) -> str:
    location = Location(rows.url, rows.storage_options)
    if not location.is_local:
        _register(location.fs, context.connect())
    return duckdb_path(location.fs, location.path)


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
