"""Rows of a source file, read in the worker: the columns, rows and filter that are wanted alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vane_dagster import _failpoints
from vane_dagster.errors import IntegrityError, SourceError
from vane_dagster.pipeline.source import ParquetSource
from vane_dagster.planning.source_files import file_version, listed_file
from vane_dagster.storage.damage import is_damage
from vane_dagster.storage.filesystem import Location, duckdb_path, protocols
from vane_dagster.storage.transient_errors import advice, persistently
from vane_dagster.types.schema import seen_by_sql, sql_name
from vane_dagster.types.sql import computed_from, passed_through, quote, select_list, unused
from vane_dagster.worker.database import connection, expression_error
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.protocol import FileRows, Project, Work

_ROW = "file_row_number"


def scan(rows: FileRows, work: Work) -> pa.Table:
    """The rows as they are: by whole row groups where the range allows, else by DuckDB.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
    """
    kept = _kept_out_of_sql(rows.schema.names, rows)
    table = _read_row_groups(rows, kept, work)
    if others := [name for name in rows.schema.names if name not in table.column_names]:
        read = _query(rows, ", ".join(quote(name) for name in others), work)
        _check_is_as_planned(rows, work)
        columns = [*zip(others, read.columns), *zip(table.column_names, table.columns)]
        table = pa.table(dict(columns))
    else:
        _check_is_as_planned(rows, work)
    if table.num_rows != rows.stop - rows.start:
        raise IntegrityError(
            f"{work.culprit}: {table.num_rows} rows were read of {rows.url!r}, expected "
            f"{rows.stop - rows.start} by its footer. Write the file again"
        )
    return _checked_ids(table.select(rows.schema.names).cast(rows.schema), rows, work)


def scan_projected(op: Project, rows: FileRows, work: Work) -> pa.Table:
    """SQL columns and a filter, pushed into the scan.

    Columns that SQL would change are read beside it, and put to the rows that it leaves.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
        SchemaError: If an expression fails for a row.
    """
    passed = passed_through(op.columns, rows.schema)
    kept = _kept_out_of_sql(passed.values(), rows)
    computed = [(name, e) for name, e in op.columns if passed.get(name) not in kept]
    place = unused("row", [name for name, _ in op.columns])
    table = _computed([*computed, (place, _ROW)] if kept else computed, op.where, rows, work)
    values = _read_row_groups(rows, kept, work, whole=False) if kept else None
    _check_is_as_planned(rows, work)
    if values is not None:
        values = values.take(pc.subtract(table.column(place), rows.start))
        columns = dict(zip(table.column_names, table.columns))
        columns |= {n: values.column(c) for n, c in passed.items() if c in kept}
        table = pa.table({name: columns[name] for name, _ in op.columns})
    return _checked_ids(table, rows, work)


def _kept_out_of_sql(names: Iterable[str], rows: FileRows) -> list[str]:
    """The columns whose types SQL would change."""
    kinds = {name: rows.schema.field(name).type for name in names}
    return [name for name, kind in kinds.items() if seen_by_sql(kind) != kind]


def _read_row_groups(
    rows: FileRows, columns: Sequence[str], work: Work, whole: bool = True
) -> pa.Table:
    """Columns of the rows as Parquet's own reader gives them, which decodes whole row groups.

    With `whole`, all columns of a range that is made of whole row groups.
    """
    location = Location(rows.url, rows.storage_options)

    def read() -> pa.Table:
        with location.fs.open(location.path, "rb") as stream, _opened(location, stream) as file:
            groups, first, stop = _row_groups(file.metadata, rows)
            aligned = whole and (first, stop) == (rows.start, rows.stop)
            wanted = rows.schema.names if aligned else list(columns)
            if not wanted:
                return pa.table({})
            table = file.read_row_groups(groups, columns=wanted, use_threads=False)
            return table.select(wanted).slice(rows.start - first, rows.stop - rows.start)

    try:
        table = persistently(_failpoints.failing("read", rows.url, read))
    except Exception as error:  # drivers have exceptions of their own, of many kinds
        raise _unreadable(rows, work, error) from error
    return table.cast(pa.schema([rows.schema.field(name) for name in table.column_names]))


def _check_is_as_planned(rows: FileRows, work: Work) -> None:
    """Sees, after reading, that the file is still the one that the fragment's key stands for."""
    try:
        source = ParquetSource(rows.url, storage_options=rows.storage_options)
        now = persistently(lambda: listed_file(rows.url, source))
    except Exception as error:  # drivers have exceptions of their own, of many kinds
        raise _unreadable(rows, work, error) from error
    if file_version(now) != file_version(rows.file):
        raise SourceError(
            f"{work.culprit}: {rows.url!r} was replaced while the run read it ({rows.file.size} "
            f"bytes when it was planned, {now.size} now). Run the partition again"
        )


def _opened(location: Location, stream: object) -> pq.ParquetFile:
    if location.is_local:
        return pq.ParquetFile(location.path, memory_map=True, page_checksum_verification=True)
    return pq.ParquetFile(stream, pre_buffer=True, page_checksum_verification=True)


def _row_groups(footer: pq.FileMetaData, rows: FileRows) -> tuple[list[int], int, int]:
    """The row groups that a range reaches into, their first row, and the one after their last."""
    edges = [0]
    for index in range(footer.num_row_groups):
        edges.append(edges[-1] + footer.row_group(index).num_rows)
    spans = list(enumerate(itertools.pairwise(edges)))
    reached = [(i, a, b) for i, (a, b) in spans if a < rows.stop and b > rows.start]
    if not reached:
        return [], rows.start, rows.start
    return [i for i, _, _ in reached], reached[0][1], reached[-1][2]


def _computed(
    columns: Sequence[tuple[str, str]], where: str | None, rows: FileRows, work: Work
) -> pa.Table:
    """Expressions over the rows that a filter leaves.

    An error is of the file if its columns cannot be read as they are either, else of the SQL.
    """

    def run(columns: Sequence[tuple[str, str]], where: str | None) -> pa.Table:
        return _asked(rows, select_list(columns), where)

    try:
        return run(columns, where)
    except (duckdb.IOException, OSError) as error:
        raise _unreadable(rows, work, error) from error
    except duckdb.Error as error:
        read = computed_from(columns, where, rows.schema)
        _query(rows, ", ".join(quote(name) for name in read) or _ROW, work)
        raise expression_error(columns, where, run, error, work) from error


def _query(rows: FileRows, listed: str, work: Work) -> pa.Table:
    try:
        return _asked(rows, listed, None)
    except (duckdb.Error, OSError) as error:
        raise _unreadable(rows, work, error) from error


def _asked(rows: FileRows, listed: str, where: str | None) -> pa.Table:
    table = f"read_parquet({_literal(_duckdb_path(rows))}, {_ROW}=true)"
    if casts := _casts(rows.schema):
        table = f"(SELECT * REPLACE ({casts}) FROM {table})"
    query = (
        f"SELECT {listed} FROM {table} AS source "
        f"WHERE {_ROW} >= {rows.start} AND {_ROW} < {rows.stop}"
    )
    query += f" AND ({where})" if where else ""
    found = _failpoints.failing("read", rows.url, lambda: connection().sql(query).to_arrow_table())
    return persistently(found)


def _casts(schema: pa.Schema) -> str:
    """Casts to the types as which SQL sees columns, where a Parquet file may tell it others."""
    seen = [(field.name, field.type, seen_by_sql(field.type)) for field in schema]
    kinds = [
        (n, sql_name(s)) for n, kind, s in seen if s is not None and (s != kind or _has_sizes(s))
    ]
    return ", ".join(f"{quote(name)}::{kind} AS {quote(name)}" for name, kind in kinds if kind)


def _has_sizes(kind: pa.DataType) -> bool:
    """Whether a type holds lists of a fixed size, which Parquet does not know."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_fixed_size_list(kind) or any(_has_sizes(child) for child in inner)


def _unreadable(rows: FileRows, work: Work, error: Exception) -> SourceError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    damaged = is_damage(error) or isinstance(error, duckdb.Error)
    fix = "Write it again, or take it out of the source" if damaged else advice(error)
    return SourceError(f"{work.culprit}: {rows.url!r} cannot be read: {reason}. {fix}")


def _checked_ids(table: pa.Table, rows: FileRows, work: Work) -> pa.Table:
    if wrong := repeated_or_null(table.column(rows.id)):
        raise SourceError(
            f"{work.culprit}: the source has {wrong} in {rows.id!r}; an id must be unique and not "
            "null inside a partition. Mend the source, or filter the rows out with where="
        )
    return table


def _duckdb_path(rows: FileRows) -> str:
    location = Location(rows.url, rows.storage_options)
    if not location.is_local:
        _register(location.fs)
    return duckdb_path(location.fs, location.path)


_registered: dict[str, fsspec.AbstractFileSystem] = {}


def _register(fs: fsspec.AbstractFileSystem) -> None:
    """Has DuckDB read by this file system, which may stand for the same protocol as another did."""
    names, opened = protocols(fs), connection()
    if all(_registered.get(name) is fs for name in names):
        return
    for name in names:
        _registered[name] = fs
        if opened.filesystem_is_registered(name):
            opened.unregister_filesystem(name)
    opened.register_filesystem(fs)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
