"""Columns that a `write` stage adds to each row: where, when and how a stage made it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.pipeline.options import COST, TOKENS
from vane_dagster.providers.usage import COUNTS
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.row_records import (
    AT,
    CODE,
    ID,
    MODEL,
    ORIGIN,
    OUTCOME,
    RUN_ID,
    Outcome,
)
from vane_dagster.worker.protocol import Provenance


def with_provenance(rows: pa.Table, given: Provenance, schema: pa.Schema) -> pa.Table:
    """Append the provenance of rows, in the columns that a schema has for it."""
    columns = _origins(rows, given)
    if TOKENS in schema.names:
        columns |= _usage(rows, given)
    for name, column in columns.items():
        if name in schema.names:
            rows = rows.append_column(name, column)
    return rows


def _origins(rows: pa.Table, given: Provenance) -> dict[str, pa.Array]:
    """Return the origin of rows by their row records; else that of the part."""
    made = given.part.made
    run_id = made.run_id if made else ""
    if not given.part.row_records:
        values = ("computed", run_id, given.model, given.code)
        named = zip(("_vane_outcome", "_vane_run", "_vane_model", "_vane_code"), values)
        columns = {name: pa.array([value] * len(rows), pa.string()) for name, value in named}
        at = pa.scalar(int(made.at * 1e6) if made else 0, pa.timestamp("us", "UTC"))
        return {**columns, "_vane_at": pa.array([at.as_py()] * len(rows), at.type)}
    records = read_part(given.folder, given.part.row_records, (ID, OUTCOME, *ORIGIN))
    records = records.take(_places(rows, given, records.column(ID)))
    outcome, run = records.column(OUTCOME), records.column(RUN_ID).cast(pa.string())
    failed = pa.array([Outcome.FAILED, Outcome.PASSING], pa.uint8())
    texts = pc.case_when(
        pc.make_struct(
            pc.is_null(outcome),
            pc.is_in(outcome, value_set=failed),
            pc.equal(run, run_id),
        ),
        pa.scalar(None, pa.string()), "failed", "computed", "copied",
    )  # fmt: skip
    return {
        "_vane_outcome": texts,
        "_vane_run": run,
        "_vane_model": records.column(MODEL).cast(pa.string()),
        # Without the row definition; see `computed_by`.
        "_vane_code": pc.replace_substring_regex(records.column(CODE).cast(pa.string()), "-.*", ""),
        "_vane_at": records.column(AT),
    }


def _usage(rows: pa.Table, given: Provenance) -> dict[str, pa.Array]:
    """Return tokens and cost of rows, by the answers in the part."""
    assert given.usage is not None
    part = read_part(given.folder, given.part.name, (given.id, given.usage.column))
    places = _places(rows, given, part.column(given.id))
    usage = part.column(given.usage.column).combine_chunks().take(places)
    counts = {name: pc.struct_field(usage, name) for name in COUNTS}
    tokens = pc.add(counts["prompt_tokens"], counts["completion_tokens"])
    rows_of = zip(*(column.to_pylist() for column in counts.values()))
    costs = [None if None in row else given.usage.cost(dict(zip(COUNTS, row))) for row in rows_of]
    return {TOKENS: tokens, COST: pa.array(costs, pa.float64())}


def _places(rows: pa.Table, given: Provenance, ids: pa.ChunkedArray) -> pa.Array:
    """Return the place of each row's id among some ids; null without one."""
    known = ids.combine_chunks()
    wanted = rows.column(given.id).combine_chunks().cast(known.type)
    return pc.index_in(wanted, value_set=known)
