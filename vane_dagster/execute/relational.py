"""What workers do with rows without user code: take them in, project, join, gather."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.commit.writer import read_part
from vane_dagster.declare.sql import select
from vane_dagster.execute.scan import connection, scan, scan_projected
from vane_dagster.execute.work import FileRows, HeldRows, Join, Project, Rows, Work


def resolve(rows: Rows, tables: Sequence[pa.Table], work: Work) -> pa.Table:
    """The rows of an input as a table."""
    if isinstance(rows, HeldRows):
        table = tables[rows.index]
        return table.slice(rows.start, None if rows.stop is None else rows.stop - rows.start)
    if isinstance(rows, FileRows):
        return scan(rows, work)
    return read_part(rows.folder, rows.name, rows.columns)


def project(op: Project, rows: Rows, tables: Sequence[pa.Table], work: Work) -> pa.Table:
    """Columns and a filter in SQL, pushed into the Parquet scan where the input is a file."""
    if isinstance(rows, FileRows):
        return scan_projected(op, rows, work)
    table = resolve(rows, tables, work)
    connection().register("source", table)
    try:
        return connection().sql(select(op.columns, op.where, "source")).to_arrow_table()
    finally:
        connection().unregister("source")


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
