"""Rows of the source that could not be read: the stage that reads them quarantines them.

They travel with the other rows, in the column `ROW_ERROR`, until an operation computes something.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import SourceError
from vane_dagster.retries import TRANSIENT
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.types.casts import cast_table
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import Computed, Tally, WorkReport
from vane_dagster.worker.retry import RowFault
from vane_dagster.worker.row_errors import fault_table, reported

SOURCE_LABEL = "source"
"""In records of rows that could not be read, it stands in place of the class or function."""


def split_unread(table: pa.Table) -> tuple[pa.Table, list[RowFault]]:
    """Separate the rows that were read from those that could not be."""
    if ROW_ERROR not in table.column_names:
        return table, []
    errors = table.column(ROW_ERROR)
    rows = unsliced(table.drop_columns(ROW_ERROR))
    is_read = pc.is_null(errors)
    faults = []
    for place in pc.indices_nonzero(pc.invert(is_read)).to_pylist():
        error = errors[place].as_py()
        row, kind = rows.slice(place, 1), error["error"]
        fault = SourceError(error["message"])
        faults.append(RowFault(row, fault, 1, kind, kind in TRANSIENT, SOURCE_LABEL))
    return (rows.filter(is_read) if faults else rows), faults


def computed(rows: pa.Table, given: int, unread: Sequence[RowFault], work: Work) -> Computed:
    """Return the result of an operation without user code."""
    tally = Tally(given + len(unread), given - rows.num_rows, len(unread), unread=len(unread))
    records = fault_table(unread, work, [work.id]) if unread else None
    rows = cast_table(rows, work.schema)
    return Computed(rows, WorkReport(tally, faults=reported(records)), records)
