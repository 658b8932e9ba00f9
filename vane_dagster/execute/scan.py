"""Rows of a source file, read in the worker: the columns, rows and filter that are wanted alone."""

from __future__ import annotations

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster import failpoints
from vane_dagster.commit.damage import is_damage
from vane_dagster.commit.location import Location, duckdb_path, protocols
from vane_dagster.commit.transient import advice, persistently
from vane_dagster.declare.schema import sql_name
from vane_dagster.declare.source import ParquetSource
from vane_dagster.declare.sql import quote, select_list
from vane_dagster.errors import IntegrityError, SourceError
from vane_dagster.execute.database import connection
from vane_dagster.execute.ids import repeated_or_null
from vane_dagster.execute.operations import FileRows, Project
from vane_dagster.execute.work import Work
from vane_dagster.plan.source import file_version, listed_file

_ROW = "file_row_number"


def scan(rows: FileRows, work: Work) -> pa.Table:
    """The rows as they are: by whole row groups where the range allows, else by DuckDB.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
    """
    location = Location(rows.url, rows.storage_options)

    def read() -> pa.Table | None:
        with location.fs.open(location.path, "rb") as stream, _opened(location, stream) as file:
            groups = _row_groups(file.metadata, rows)
            if groups is None:
                return None
            return file.read_row_groups(groups, columns=rows.schema.names, use_threads=False)

    try:
        table = persistently(failpoints.failing("read", rows.url, read))
    except Exception as error:  # drivers have exceptions of their own, of many kinds
        raise _unreadable(rows, work, error) from error
    if table is None:
        table = _query(rows, ", ".join(quote(name) for name in rows.schema.names), None, work)
    _check_is_as_planned(rows, work)
    if table.num_rows != rows.stop - rows.start:
        raise IntegrityError(
            f"{work.culprit}: {table.num_rows} rows were read of {rows.url!r}, expected "
            f"{rows.stop - rows.start} by its footer. Write the file again"
        )
    return _checked_ids(table.select(rows.schema.names).cast(rows.schema), rows, work)


def scan_projected(op: Project, rows: FileRows, work: Work) -> pa.Table:
    """SQL columns and a filter, pushed into the scan.

    Raises:
        SourceError: If they cannot be read, or their ids are not unique.
    """
    table = _query(rows, select_list(op.columns), op.where, work)
    _check_is_as_planned(rows, work)
    return _checked_ids(table, rows, work)


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


def _row_groups(footer: pq.FileMetaData, rows: FileRows) -> list[int] | None:
    """The row groups that make up the range; None where it begins or ends inside one."""
    edges = [0]
    for index in range(footer.num_row_groups):
        edges.append(edges[-1] + footer.row_group(index).num_rows)
    if rows.start not in edges or rows.stop not in edges:
        return None
    return [i for i, edge in enumerate(edges[:-1]) if rows.start <= edge < rows.stop]


def _query(rows: FileRows, listed: str, where: str | None, work: Work) -> pa.Table:
    table = f"read_parquet({_literal(_duckdb_path(rows))}, {_ROW}=true)"
    if arrays := _arrays(rows.schema):
        table = f"(SELECT * REPLACE ({arrays}) FROM {table})"
    query = (
        f"SELECT {listed} FROM {table} AS source "
        f"WHERE {_ROW} >= {rows.start} AND {_ROW} < {rows.stop}"
    )
    query += f" AND ({where})" if where else ""
    try:
        found = failpoints.failing(
            "read", rows.url, lambda: connection().sql(query).to_arrow_table()
        )
        return persistently(found)
    except (duckdb.Error, OSError) as error:
        raise _unreadable(rows, work, error) from error


def _arrays(schema: pa.Schema) -> str:
    """Casts that Parquet's lists need to be the fixed-size lists that the file's schema tells."""
    fixed = [f for f in schema if pa.types.is_fixed_size_list(f.type) and sql_name(f.type)]
    return ", ".join(
        f"{quote(field.name)}::{sql_name(field.type)} AS {quote(field.name)}" for field in fixed
    )


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
