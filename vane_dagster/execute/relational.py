"""What workers do with rows without user code: read, project, join, gather."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import duckdb
import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.commit.location import Location
from vane_dagster.commit.writer import read_part
from vane_dagster.declare.database import connect
from vane_dagster.declare.sql import quote, select, select_list
from vane_dagster.errors import SourceError
from vane_dagster.execute.batches import repeated_or_null
from vane_dagster.execute.work import FileRows, HeldRows, Join, Project, Rows, Work

_ROW = "file_row_number"


@functools.lru_cache(maxsize=1)
def connection() -> duckdb.DuckDBPyConnection:
    """The worker's DuckDB, opened once."""
    return connect()


def resolve(rows: Rows, tables: Sequence[pa.Table], work: Work) -> pa.Table:
    """The rows of an input as a table."""
    if isinstance(rows, HeldRows):
        table = tables[rows.index]
        return table.slice(rows.start, None if rows.stop is None else rows.stop - rows.start)
    if isinstance(rows, FileRows):
        listed = "*" if rows.columns is None else ", ".join(quote(c) for c in rows.columns)
        return _read_file(rows, listed, None, work)
    return read_part(rows.folder, rows.name, rows.columns)


def project(op: Project, rows: Rows, tables: Sequence[pa.Table], work: Work) -> pa.Table:
    """Columns and a filter in SQL, pushed into the Parquet scan where the input is a file."""
    if isinstance(rows, FileRows):
        return _read_file(rows, select_list(op.columns), op.where, work)
    table = resolve(rows, tables, work)
    connection().register("source", table)
    try:
        return connection().sql(select(op.columns, op.where, "source")).to_arrow_table()
    finally:
        connection().unregister("source")


def _read_file(rows: FileRows, listed: str, where: str | None, work: Work) -> pa.Table:
    table = f"read_parquet({_literal(_duckdb_path(rows))}, {_ROW}=true) AS source"
    query = f"SELECT {listed} FROM {table} WHERE {_ROW} >= {rows.start} AND {_ROW} < {rows.stop}"
    if where:
        query += f" AND ({where})"
    try:
        found = connection().sql(query).to_arrow_table()
    except (duckdb.Error, OSError) as error:
        raise SourceError(
            f"{work.culprit}: {rows.url!r} cannot be read: {str(error).strip().splitlines()[0]}"
        ) from error
    if _ROW in found.column_names and _ROW not in work.schema.names:
        found = found.drop_columns([_ROW])
    return checked_ids(found, work)


def checked_ids(table: pa.Table, work: Work) -> pa.Table:
    """The table, if the ids that come from the source are unique and not null.

    Raises:
        SourceError: If they are not.
    """
    if wrong := repeated_or_null(table.column(work.id)):
        raise SourceError(
            f"{work.culprit}: the source has {wrong} in {work.id!r}; an id must be unique and not "
            "null inside a partition. Mend the source, or filter the rows out with where="
        )
    return table


def _duckdb_path(rows: FileRows) -> str:
    location = Location(rows.url, rows.storage_options)
    if location.is_local:
        return location.path
    _register(location.fs)
    return str(location.fs.unstrip_protocol(location.path))


@functools.lru_cache(maxsize=64)
def _register(fs: fsspec.AbstractFileSystem) -> None:
    opened = connection()
    for name in (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol:
        if opened.filesystem_is_registered(name):
            opened.unregister_filesystem(name)
    opened.register_filesystem(fs)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def join(op: Join, inputs: Sequence[pa.Table], work: Work) -> pa.Table:
    """Inputs side by side by id, in the order of the first.

    An inner join keeps the rows that every input has, a left join those of the first.
    """
    base, *others = inputs
    ids = base.column(work.id).combine_chunks()
    positions = [_positions(ids, other.column(work.id)) for other in others]
    if op.how == "inner" and any(p is not None and p.null_count for p in positions):
        present = [pc.is_valid(p) for p in positions if p is not None]
        keep = functools.reduce(pc.and_, present)
        base = base.filter(keep)
        kept = pc.indices_nonzero(keep)
        positions = [kept if p is None else p.filter(keep) for p in positions]
    columns: dict[str, Any] = dict(zip(base.column_names, base.columns))
    for other, position in zip(others, positions):
        rest = other.select([n for n in other.column_names if n != work.id])
        taken = rest if position is None else rest.take(position)
        columns |= dict(zip(taken.column_names, taken.columns))
    return pa.table({name: columns[name] for name in work.schema.names})


def _positions(ids: pa.Array, other: pa.ChunkedArray) -> pa.Array | None:
    """Where each id stands in `other`, null where it does not; None if both are the same."""
    other = other.combine_chunks()
    return None if other.equals(ids) else pc.index_in(ids, value_set=other)


def gather(inputs: Sequence[pa.Table], work: Work) -> pa.Table:
    """Inputs one below the other; an empty table of the schema if there are none."""
    return pa.concat_tables(inputs) if inputs else work.schema.empty_table()
