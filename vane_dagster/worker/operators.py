"""Operations on rows without user code: read inputs, project, join, gather."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.pipeline.keys import JoinSide
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.quarantine import PARENTS
from vane_dagster.types.casts import cast_table
from vane_dagster.types.schema import empty_table, seen_by_sql
from vane_dagster.types.sql import (
    computed_from,
    expression_error,
    passed_through,
    quote,
    select,
    unused,
)
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.database import connection
from vane_dagster.worker.protocol import (
    Join,
    Project,
    Quarantined,
    Rows,
    SampledRows,
    SourceRows,
    TableRows,
    Work,
)
from vane_dagster.worker.retry import RowFault
from vane_dagster.worker.source_rows import checked_ids, scan, scan_unchecked
from vane_dagster.worker.unread_rows import split_unread


def resolve(rows: Rows, tables: Sequence[pa.Table], work: Work) -> pa.Table:
    """Read the rows of an input as a table."""
    if isinstance(rows, TableRows):
        table = tables[rows.index]
        count = None if rows.stop is None else rows.stop - rows.start
        errors = [ROW_ERROR] if ROW_ERROR in table.column_names else []
        chosen = table if rows.columns is None else table.select([*rows.columns, *errors])
        return unsliced(chosen.slice(rows.start, count))
    if isinstance(rows, SourceRows):
        return scan(rows, work)
    if isinstance(rows, SampledRows):
        return resolve(rows.rows, tables, work).take(pa.array(rows.places, pa.int64()))
    return unsliced(read_part(rows.folder, rows.name, rows.columns))


def project(
    op: Project, rows: Rows, tables: Sequence[pa.Table], work: Work
) -> tuple[pa.Table, int, list[RowFault]]:
    """Compute SQL columns and a filter."""
    if op.includes:
        made = {name for name, _ in op.columns}
        passed = [(name, quote(name)) for name in work.schema.names if name not in made]
        op = replace(op, columns=(*op.columns, *passed))
    if not isinstance(rows, SourceRows):
        given, unread = split_unread(resolve(rows, tables, work))
        return _projected(op, given, work), given.num_rows, unread
    given, unread = split_unread(scan_unchecked(rows, work))
    table = _projected(op, given, work)
    return checked_ids(table, rows, work), given.num_rows, unread


def _projected(op: Project, table: pa.Table, work: Work) -> pa.Table:
    passed = passed_through(op.columns, table.schema)
    computed = [(name, text) for name, text in op.columns if name not in passed]
    kept, results = table, {}
    if computed or op.where:
        projected = _computed(computed, op.where, table, work)
        places = projected.column(projected.num_columns - 1)
        kept = table if len(places) == table.num_rows else table.take(places)
        results = dict(zip(projected.column_names, projected.columns))
    columns = {n: kept.column(passed[n]) if n in passed else results[n] for n, _ in op.columns}
    return pa.table(columns)


def _computed(
    columns: Sequence[tuple[str, str]], where: str | None, table: pa.Table, work: Work
) -> pa.Table:
    """Compute expressions over the rows that pass a filter, and the positions of these rows."""
    wanted = computed_from(columns, where, table.schema)
    seen = pa.schema([(f.name, seen_by_sql(f.type) or f.type) for f in map(table.field, wanted)])
    place = unused("row", [*table.column_names, *(name for name, _ in columns)])
    given = dict(zip(wanted, cast_table(table, seen).columns))
    given[place] = pa.array(np.arange(table.num_rows))  # keeps the row count without columns
    connection().register("source", pa.table(given))

    def run(columns: Sequence[tuple[str, str]], where: str | None) -> pa.Table:
        return connection().sql(select(columns, where, "source")).to_arrow_table()

    try:
        return run([*columns, (place, quote(place))], where)
    except duckdb.Error as error:
        raise expression_error(columns, where, run, error, work.location) from error
    finally:
        connection().unregister("source")


def join(op: Join, inputs: Sequence[pa.Table], work: Work) -> tuple[pa.Table, int, list[RowFault]]:
    """Join inputs by id, in the order of the base.

    An inner join keeps the base's rows that every input has, a left join keeps all of them.
    """
    readable = {node: split_unread(table) for node, table in zip(op.nodes, inputs)}
    by_node = {node: table for node, (table, _) in readable.items()}
    base, unread = readable[op.shape.base]
    for side in op.shape.sides:
        base, more = _without_unread(base, readable[side.node][1], side)
        unread = [*unread, *more]
    given = base.num_rows
    places = {s.node: _positions(base, by_node[s.node], s) for s in op.shape.sides if not s.label}
    if op.how == "inner":
        present = [pc.is_valid(p) for p in places.values() if p is not None and p.null_count]
        for side in filter(lambda side: side.label, op.shape.sides):
            parents = by_node[side.node].column(op.shape.id)
            present.append(pc.is_in(base.column(op.shape.id), value_set=parents).combine_chunks())
        if present:
            mask = functools.reduce(pc.and_, present)
            base, rows = base.filter(mask), pc.indices_nonzero(mask)
            places = {n: rows if p is None else p.filter(mask) for n, p in places.items()}
    columns = dict(zip(base.column_names, base.columns)) | _taken(op, op.shape.base, base)
    for side in op.shape.sides:
        table = by_node[side.node]
        if side.label is not None:
            columns[side.label] = _lists(base, table, op, side, work.schema.field(side.label).type)
            continue
        at = places[side.node]
        columns |= _taken(op, side.node, table if at is None else table.take(at), side.known)
    return pa.table({name: columns[name] for name in work.schema.names}), given, unread


def _without_unread(
    base: pa.Table, unread: Sequence[RowFault], side: JoinSide
) -> tuple[pa.Table, list[RowFault]]:
    """Separate the base's rows that match a row of an input that could not be read."""
    if not unread or side.label is not None:
        return base, []
    faults = {fault.batch.column(side.id)[0].as_py(): fault for fault in unread}
    matches = pc.is_in(base.column(side.id), value_set=pa.array(faults, base[side.id].type))
    places = np.flatnonzero(matches.combine_chunks().to_numpy(zero_copy_only=False))
    failed = []
    for place in places.tolist():
        fault = faults[base[side.id][place].as_py()]
        failed.append(replace(fault, batch=base.slice(place, 1)))
    return unsliced(base).filter(pc.invert(matches)), failed


def _taken(op: Join, node: str, table: pa.Table, known: Collection[str] = ()) -> dict[str, Any]:
    """Return the columns of an input under their new names, without ids that the base has."""
    everything = dict(zip(table.column_names, table.columns))
    chosen = op.columns.get(node, [(name, name) for name in everything])
    return {
        name: everything[column]
        for name, column in chosen
        if not (name == column and column in known)
    }


def _positions(base: pa.Table, other: pa.Table, side: JoinSide) -> pa.Array | None:
    """Return the position of each base's row in an input, null if absent; None if they align."""
    ids, others = base.column(side.id), other.column(side.id)
    if others.equals(ids):
        return None
    return pc.index_in(ids, value_set=others.combine_chunks()).combine_chunks()


def _lists(
    base: pa.Table, other: pa.Table, op: Join, side: JoinSide, kind: pa.ListType
) -> pa.Array:
    """Collect for each row of the base the rows of `other` that were made from it, in order.

    The list is null, not empty, if the row or one made from it was quarantined on the way.
    """
    positions = pc.index_in(
        other.column(op.shape.id), value_set=base.column(op.shape.id).combine_chunks()
    ).combine_chunks()
    other = other.filter(pc.is_valid(positions))
    owners = positions.drop_null().to_numpy(zero_copy_only=False)
    counts = np.bincount(owners, minlength=base.num_rows)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ordered = other.take(pa.array(np.argsort(owners, kind="stable")))
    inputs = dict(op.columns.get(side.node, ()))
    fields = list(kind.value_type)
    values = [ordered.column(inputs.get(f.name, f.name)).combine_chunks() for f in fields]
    structs = pa.StructArray.from_arrays(values, fields=fields)
    unknown = np.zeros(base.num_rows, bool)
    for rows in op.quarantined.get(side.node, ()):
        unknown |= _are_quarantined(rows, base)
    mask = pa.array(unknown & (counts == 0))
    return pa.ListArray.from_arrays(pa.array(offsets), structs, kind, mask=mask)


def _are_quarantined(rows: Quarantined, base: pa.Table) -> npt.NDArray[np.bool_]:
    records = read_part(rows.faults.folder, rows.faults.name)
    if rows.parent is None:
        ids = records.column("id")
    else:
        ids = pc.struct_field(records.column(PARENTS), rows.parent)
    given = base.column(rows.column)
    is_listed = pc.is_in(given, value_set=ids.combine_chunks().cast(given.type))
    return np.asarray(is_listed.combine_chunks().to_numpy(zero_copy_only=False), bool)


def gather(inputs: Sequence[pa.Table], work: Work) -> pa.Table:
    """Concatenate inputs; without any, return an empty table of the task's schema."""
    return pa.concat_tables(inputs) if inputs else empty_table(work.schema)
