"""Rows of earlier parts: looked up by key, and copied.

Indexes and decoded parts are mapped Arrow files that the processes of a node share. They are
deleted an hour after their last use. A process keeps them mapped for about as long, because opening
one takes longer than copying a few rows, and because a deleted file takes disk space as long as a
process maps it. If the disk has no room for them, each process computes them when it needs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._private_folder import worker_folder
from vane_dagster.errors import DamagedPartError
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.row_records import (
    CODE,
    EPOCH,
    ID,
    KEY_HIGH,
    KEY_LOW,
    ORIGIN,
    OUTCOME,
    Outcome,
    RecordedPart,
    parse_code,
)
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.arrow_files import read_table, write_table
from vane_dagster.worker.node_files import new_entry, shared_entry
from vane_dagster.worker.output_ids import places_within
from vane_dagster.worker.protocol import Places

_FORMAT = 2
"""Increment if the files change."""
_UNUSED_SECONDS = 3600.0
"""A run needs a file within minutes; others may have as many as there are partitions."""
_MOST_OPEN = 5_000
"""Each takes some 20 kB, and two of the 65,530 mapped files that Linux allows a process."""
_FEW = 8
"""A fragment takes few rows of a part if it has more than this many times as many."""
_PART, _RECORD, _FAILED = "part", "record", "failed"
_FIRST, _COUNT = "first", "count"

Numbers = npt.NDArray[Any]
_Tables = Mapping[str, pa.Table]
_open: dict[tuple[Any, ...], tuple[float, _Tables]] = {}
"""What this process has mapped and since when, by the identity; the oldest first."""


def _shared(
    identity: tuple[Any, ...], names: Sequence[str], make: Callable[[], _Tables]
) -> _Tables:
    """Return tables that the node has, and make them first if it has none."""
    if known := _open.get(identity):
        return known[1]
    entries = worker_folder("row_reuse")
    name = hashlib.sha256(json.dumps([_FORMAT, *identity]).encode()).hexdigest()
    place = entries / name

    def find() -> _Tables | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            tables, now = {each: read_table(place / each) for each in names}, time.monotonic()
            oldest, _ = next(iter(_open.values()), (now, None))
            if len(_open) >= _MOST_OPEN or now - oldest > _UNUSED_SECONDS:
                _open.clear()
            _open[identity] = now, tables
            return tables
        return None

    def written() -> _Tables:
        tables = make()
        with contextlib.suppress(OSError), new_entry(entries, name) as partial:
            for each, table in tables.items():
                table = table.unify_dictionaries().combine_chunks()
                write_table(table, partial / "new", each)
        return find() or tables

    # A mapped file that another process deletes can still be read, so no lock is held.
    return shared_entry(entries, name, find, written, hold=False, unused_seconds=_UNUSED_SECONDS)


def open_index(parts: Sequence[RecordedPart], floor: int, equal_rows: Sequence[str]) -> pa.Table:
    """Open the row records of a group of parts, sorted by the row key, for `find_rows`.

    It has no records of an epoch below the floor, nor of other row definitions than those given,
    whatever the manifest's is: an adoption by which it has them may be gone. It has one record for
    each key or equal high half: the first that did not fail, else the first. Other rows are
    computed again.
    """
    urls = tuple(part.folder.file_url(part.records) for part in parts)

    def make() -> _Tables:
        return {"index": _index(parts, floor, equal_rows)}

    return _shared((floor, urls, *equal_rows), ["index"], make)["index"]


def find_rows(
    index: pa.Table, high: Numbers, low: Numbers, *, failed: bool
) -> tuple[Numbers, Numbers]:
    """Return the part and the position of each key's record; -1 without one."""
    columns = {name: index.column(name).to_numpy() for name in index.column_names}
    entry = np.searchsorted(columns[KEY_HIGH], high)
    rows = np.flatnonzero(entry < len(index))
    for name, halves in ((KEY_HIGH, high), (KEY_LOW, low)):
        rows = rows[columns[name][entry[rows]] == halves[rows]]
    if not failed:
        rows = rows[columns[_FAILED][entry[rows]] == 0]
    part, record = (np.full(len(high), -1, np.int32) for _ in range(2))
    part[rows], record[rows] = columns[_PART][entry[rows]], columns[_RECORD][entry[rows]]
    return part, record


def _index(parts: Sequence[RecordedPart], floor: int, equal_rows: Collection[str]) -> pa.Table:
    pieces = []
    names = (KEY_HIGH, KEY_LOW, OUTCOME, EPOCH, CODE)
    for number, part in enumerate(parts):
        table = read_part(part.folder, part.records, names)
        outcome = table[OUTCOME].to_numpy()
        is_found = outcome != Outcome.PASSING
        codes = table[CODE].unify_dictionaries().combine_chunks()
        is_equal = [parse_code(code)[1] in equal_rows for code in codes.dictionary.to_pylist()]
        is_equal = np.asarray([*is_equal, False])[codes.indices.to_numpy()]
        kept = np.flatnonzero(is_found & is_equal & (table[EPOCH].to_numpy() >= floor))
        pieces.append(
            {
                KEY_HIGH: table[KEY_HIGH].to_numpy()[kept],
                KEY_LOW: table[KEY_LOW].to_numpy()[kept],
                _FAILED: (outcome[kept] == Outcome.FAILED).astype(np.uint8),
                _PART: np.full(len(kept), number, np.int32),
                _RECORD: kept.astype(np.int32),
            }
        )
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    order = np.argsort(columns[KEY_HIGH])
    high = columns[KEY_HIGH][order]
    starts = np.flatnonzero(np.diff(high, prepend=~high[:1]))
    if len(starts) < len(order):
        ranks = order + columns[_FAILED][order] * np.int64(len(order))
        order = np.minimum.reduceat(ranks, starts) % len(order)
    return pa.table({name: values[order] for name, values in columns.items()})


def take_rows(stored: _Tables, places: Places) -> tuple[pa.Table, pa.Table, Places]:
    """Return the records at some positions, their output rows, and how many each has."""
    records = stored["records"].take(pa.array(places))
    first, count = (records.column(name).to_numpy() for name in (_FIRST, _COUNT))
    rows = np.repeat(first, count) + places_within(count)
    return records, stored["values"].take(pa.array(rows)), count


def stored_rows(part: RecordedPart, id: str, own: Sequence[str], wanted: int) -> _Tables:
    """Return the outcomes of a part's input rows.

    ``records`` has their ids, outcomes and origins, in the order of the input, each with the first
    of its output rows and their number; ``values`` has the columns that the code has made of them.

    If a fragment takes only few of them, for example after a shuffle of the table, others are
    likely to take the rest. Then the part is decoded once for all processes of the node.
    """
    if wanted * _FEW >= part.rows:
        return _read(part, id, own)
    identity = (part.folder.url, part.part, part.records, id, *own)
    names = ("records", "values")
    return _shared(identity, names, lambda: _read(part, id, own))


def _read(part: RecordedPart, id: str, own: Sequence[str]) -> dict[str, pa.Table]:
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
    return {
        "records": records,
        "values": values if is_sorted else values.take(pa.array(order)),
    }
