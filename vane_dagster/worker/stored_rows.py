"""What a part's input rows became, for copying some of them.

If a fragment takes only few rows of a part, as after a table was shuffled, others are likely to
take the rest. Then the part is decoded once for all processes of the node, into mapped files from
which single rows can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import DamagedPartError, StoreError
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.row_records import ID, ORIGIN, OUTCOME, Outcome, RecordedPart
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.node_files import DerivedFiles, check_room
from vane_dagster.worker.protocol import Places

_FORMAT = 1
"""Increment if the files change."""
_FEW = 8
"""A fragment takes few rows of a part if it has more than this many times as many."""
_FIRST, _COUNT = "first", "count"
_RECORDS, _VALUES = "records.arrow", "values.arrow"


@dataclass(frozen=True)
class StoredRows:
    """The outcomes of a part's input rows.

    Attributes:
        records: Their ids, outcomes and origins, in the order of the input, each with the first of
            its output rows and their number.
        values: The columns that the code has made of them.
    """

    records: pa.Table
    values: pa.Table

    def take(self, places: Places) -> tuple[pa.Table, pa.Table, Places]:
        """Return the records at some positions, their output rows, and how many each has."""
        records = self.records.take(pa.array(places))
        first, count = (records.column(name).to_numpy() for name in (_FIRST, _COUNT))
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return records, self.values.take(pa.array(np.repeat(first, count) + within)), count


def stored_rows(
    part: RecordedPart, id: str, own: Sequence[str], wanted: int, folder: Path | None = None
) -> StoredRows:
    """Return the outcomes of a part's input rows."""
    if wanted * _FEW >= part.rows:
        return _read(part, id, own)

    def build(partial: Path) -> None:
        rows = _read(part, id, own)
        check_room(partial, rows.records.nbytes + rows.values.nbytes, "The rows of a part")
        _write(rows.records, partial / "new" / _RECORDS)
        _write(rows.values, partial / "new" / _VALUES)

    identity = [_FORMAT, part.folder.url, part.part, part.records, id, *own]
    try:
        return _parts.open(identity, build, folder)
    except DamagedPartError:
        raise
    except (StoreError, OSError):  # the node has no room
        return _read(part, id, own)


def _read(part: RecordedPart, id: str, own: Sequence[str]) -> StoredRows:
    records = read_part(part.folder, part.records, (ID, OUTCOME, *ORIGIN))
    rows = unsliced(read_part(part.folder, part.part, list(dict.fromkeys([id, *own]))))
    ids = records.column(ID).combine_chunks().cast(rows.schema.field(id).type)
    owner = pc.fill_null(pc.index_in(rows.column(id), value_set=ids), -1).to_numpy()
    order = np.argsort(owner, kind="stable")
    has_output = records.column(OUTCOME).to_numpy() == Outcome.OUTPUT
    count = np.bincount(owner[owner >= 0], minlength=len(ids))
    if (count[has_output] == 0).any():
        url = part.folder.file_url(part.part)
        raise DamagedPartError(
            f"part {url!r} lacks rows that its records {part.records!r} name", part.part
        )
    first = np.searchsorted(owner[order], np.arange(len(ids)))
    columns = {_FIRST: first, _COUNT: np.where(has_output, count, 0)}
    for name, values in columns.items():
        records = records.append_column(name, pa.array(values))
    values = rows.select(list(own))
    is_sorted = np.array_equal(order, np.arange(len(order)))
    return StoredRows(records, values if is_sorted else values.take(pa.array(order)))


def _write(table: pa.Table, path: Path) -> None:
    table = table.unify_dictionaries().combine_chunks()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _mapped(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


_parts = DerivedFiles(
    "stored_rows",
    lambda place: StoredRows(_mapped(place / _RECORDS), _mapped(place / _VALUES)),
    most=256,
)
