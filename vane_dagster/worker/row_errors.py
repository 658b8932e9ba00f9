"""Failed rows, as error records or as rows of nulls."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._secrets import masked
from vane_dagster._user_errors import clean
from vane_dagster.errors import StageError, UdfError, described
from vane_dagster.retries import TIMED_OUT
from vane_dagster.storage.quarantine import PARENTS, TRANSIENT, fault_schema
from vane_dagster.types.schema import ERROR_COLUMN, empty_table
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.protocol import CallUdf, Reject, Work
from vane_dagster.worker.reports import Computed, Tally, WorkReport
from vane_dagster.worker.retry import BatchOutcome, RowFault, check_limit

_MAX_REPORTED = 20
_MAX_CHARACTERS = 4_000
_UNPACKED = re.compile(r'File "[^"]*/[0-9a-f]{64}/')
"""The folder of users' modules in a worker."""


def fault_table(
    faults: Sequence[RowFault], work: Work, ids: Sequence[str], model: str = ""
) -> pa.Table:
    """Convert failed rows to error records; see `fault_schema`."""
    now = datetime.now(UTC)
    parents = [faults[0].batch.schema.field(name) for name in ids[1:]]
    records = [
        {
            "id": fault.batch.column(ids[0])[0].as_py(),
            PARENTS: {field.name: fault.batch.column(field.name)[0].as_py() for field in parents},
            "stage": work.stage,
            "fragment": work.fragment,
            "error": fault.name,
            "message": masked(str(fault.error))[:_MAX_CHARACTERS],
            "traceback": user_traceback(fault.error)[-_MAX_CHARACTERS:],
            "attempts": fault.attempts,
            TRANSIENT: fault.transient,
            "run_id": work.run_id,
            "model": fault.model or model,
            "worker": work.worker,
            "at": now,
        }
        for fault in faults
    ]
    id_type = faults[0].batch.schema.field(ids[0]).type
    return pa.Table.from_pylist(records, schema=fault_schema(id_type, parents))


def null_row(fault: RowFault, work: Work, op: CallUdf) -> pa.Table:
    """The output row of a failed row: its ids and passed-on columns, nulls, and the error."""
    columns = {}
    passed_on = {*op.ids, *op.carried(work)}
    for field in work.schema:
        if field.name == ERROR_COLUMN:
            text = masked(described(fault.error, fault.name))[:_MAX_CHARACTERS]
            columns[field.name] = pa.chunked_array([pa.array([text], pa.string())])
        elif field.name in passed_on:
            columns[field.name] = fault.batch.column(field.name)
        else:
            columns[field.name] = pa.chunked_array([pa.nulls(1, field.type)])
    return pa.table(columns, schema=work.schema)


def combined(
    tables: Sequence[pa.Table],
    faults: Sequence[RowFault],
    given: pa.Table,
    work: Work,
    op: CallUdf,
    model: str,
    in_order: bool = False,
) -> Computed:
    """Return what became of input rows, in their order: output rows, and those that failed."""
    nulls = op.policy.on_error == "null"
    if nulls or not tables:
        null_rows = [null_row(fault, work, op) for fault in faults if nulls]
        tables = [empty_table(work.schema), *tables, *null_rows]
    rows = pa.concat_tables(tables, promote_options="default")
    if not in_order:
        ids = given.column(op.ids[0]).combine_chunks()
        places = pc.index_in(rows.column(op.origin), value_set=ids).combine_chunks()
        rows = unsliced(rows).take(pc.array_sort_indices(places))
    passed = pc.count_distinct(rows.column(op.parent)).as_py() if op.parent else rows.num_rows
    quarantined = 0 if nulls else len(faults)
    filtered = given.num_rows - passed - quarantined
    tally = Tally(given.num_rows, filtered, quarantined, len(faults) - quarantined)
    records = fault_table(faults, work, op.ids, model) if faults else None
    return Computed(rows, WorkReport(tally, faults=reported(records)), records)


def rejected(op: Reject, row: pa.Table, work: Work) -> Computed:
    """Return the result for a row that is given up without another call."""
    timed_out = op.error == TIMED_OUT  # on another machine it may not
    fault, call = RowFault(row, Exception(op.message), op.attempts, op.error, timed_out), op.call
    check_limit(BatchOutcome(faults=[fault]), call.policy, call.ids[0], call.max_faults)
    return combined([], [fault], row, work, op.call, op.model)


def reported(records: pa.Table | None) -> pa.Table | None:
    """Return the first error records, for the driver; a slice would carry the others too."""
    return records and records.take([*range(min(len(records), _MAX_REPORTED))])


def user_traceback(error: BaseException) -> str:
    """Format the traceback without the frames of this package."""
    try:
        last = traceback.format_exception_only(error)
    except BaseException:  # formatting reads the exception's own attributes
        last = [f"{described(error)}\n"]
    return user_frames(error) + masked(clean("".join(last)))


def user_frames(error: BaseException) -> str:
    """Format the frames of the traceback that are not of this package.

    Files of users' modules have the paths below the folder of the definitions.
    """
    own = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    text = ""
    with contextlib.suppress(BaseException):  # raised by a loader or a file name of the user's code
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(own)]
        # A result is refused by this package, or an endpoint refuses all: its frames say nothing.
        shown = theirs or ([] if isinstance(error, (UdfError, StageError)) else frames)
        text = "".join(traceback.format_list(shown))
    header = "Traceback (most recent call last):\n" if text else ""
    return _UNPACKED.sub('File "', masked(clean(header + text)))
