"""Row indexes: the row records of a group of parts, searchable by row key in bounded memory.

An index is a folder of memory-mapped arrays with one entry for each row key, sorted by it. Of
several records with a key, it has the first that did not fail, else the first. The processes of a
node share it: it is built by whichever needs it first, and named by a digest of the record files'
URLs, the floor and the format.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.row_records import (
    EPOCH,
    KEY_HIGH,
    KEY_LOW,
    OUTCOME,
    Outcome,
    RecordedPart,
)
from vane_dagster.worker.node_files import DerivedFiles, check_room

_FORMAT = 3
"""Increment if the files of an index change."""
_ARRAYS = ("high", "low", "places")
_STARTS = "starts.json"
_RECORD_BYTES = 8 * len(_ARRAYS)
_IN_MEMORY = 1_000_000
"""Records that are sorted without buckets."""
_BUCKET_BITS = 6
_FAILED = np.uint64(1 << 63)
"""The bit of a place that sorts failed records behind the others of their key."""

Numbers = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
_Entries = tuple[Numbers, Numbers, Numbers]
"""The columns of `_ARRAYS`."""


def open_index(parts: Sequence[RecordedPart], floor: int, folder: Path | None = None) -> RowIndex:
    """Open the index of a group of parts, and build it first if the node has none."""
    urls = [part.folder.file_url(part.records) for part in parts]
    return _indexes.open([_FORMAT, floor, urls], functools.partial(_build, parts, floor), folder)


class RowIndex:
    """An opened row index."""

    def __init__(self, folder: Path) -> None:
        self._starts = np.array(json.loads((folder / _STARTS).read_bytes()), np.int64)
        self._high, self._low, self._places = (_mapped(folder / n) for n in _ARRAYS)
        if len({len(self._high), len(self._low), len(self._places)}) > 1:
            raise ValueError(f"the arrays of the row index {str(folder)!r} differ in length")

    def __len__(self) -> int:
        return len(self._high)

    def find(
        self, high: Numbers, low: Numbers, *, failed: bool
    ) -> tuple[npt.NDArray[np.int32], Positions]:
        """Find stored records of rows."""
        entries = self._entries(high, low)
        rows = np.flatnonzero(entries >= 0)
        if not failed:
            rows = rows[self._places[entries[rows]] < _FAILED]
        part = np.full(len(high), -1, np.int32)
        record = np.full(len(high), -1, np.int64)
        position = (self._places[entries[rows]] & ~_FAILED).astype(np.int64)
        part[rows] = np.searchsorted(self._starts, position, "right") - 1
        record[rows] = position - self._starts[part[rows]]
        return part, record

    def _entries(self, high: Numbers, low: Numbers) -> Positions:
        """Return the entry of each key; -1 without one."""
        entry = np.searchsorted(self._high, high)
        found = np.full(len(high), -1, np.int64)
        left = np.flatnonzero(entry < len(self))
        while len(left):  # once, unless keys have the same high half
            at = entry[left]
            left, at = left[same := self._high[at] == high[left]], at[same]
            is_found = self._low[at] == low[left]
            found[left[is_found]] = at[is_found]
            left = left[~is_found]
            entry[left] += 1
            left = left[entry[left] < len(self)]
        return found


_indexes = DerivedFiles("row_indexes", RowIndex, most=32)


def _mapped(path: Path) -> Numbers:
    if not path.stat().st_size:
        return np.empty(0, np.uint64)
    return np.asarray(np.memmap(path, np.uint64, "r"))


def _build(parts: Sequence[RecordedPart], floor: int, partial: Path) -> None:
    """Write the index of parts to the folder ``new`` of a partial folder."""
    new = partial / "new"
    starts: list[int] = []
    buckets = [partial / str(number) for number in range(1 << _BUCKET_BITS)]
    with contextlib.ExitStack() as stack:
        files: list[Any] = []
        waiting: list[_Entries] = []
        waiting_rows = 0
        for entries in _entries(parts, floor, starts):
            waiting.append(entries)
            waiting_rows += len(entries[0])
            if waiting_rows > _IN_MEMORY:
                # These records twice, as buckets and sorted.
                check_room(partial, 2 * waiting_rows * _RECORD_BYTES, "A row index")
                if not files:
                    files += [stack.enter_context(open(path, "wb")) for path in buckets]
                _scatter(waiting, files)
                waiting, waiting_rows = [], 0
        if files and waiting:
            _scatter(waiting, files)
    check_room(partial, waiting_rows * _RECORD_BYTES, "A row index")
    with contextlib.ExitStack() as stack:
        arrays = [stack.enter_context(open(new / name, "wb")) for name in _ARRAYS]
        if files:
            for path in buckets:
                _write_sorted([*np.fromfile(path, np.uint64).reshape(-1, len(_ARRAYS)).T], arrays)
                path.unlink()
        elif waiting:
            _write_sorted([np.concatenate(column) for column in zip(*waiting)], arrays)
    (new / _STARTS).write_text(json.dumps(starts))


def _entries(parts: Sequence[RecordedPart], floor: int, starts: list[int]) -> Iterator[_Entries]:
    """Yield the entries of each part; append its first position to `starts`."""
    position = 0
    for part in parts:
        table = read_part(part.folder, part.records, (KEY_HIGH, KEY_LOW, OUTCOME, EPOCH))
        starts.append(position)
        outcome = table[OUTCOME].to_numpy()
        kept = np.flatnonzero((outcome != Outcome.PASSING) & (table[EPOCH].to_numpy() >= floor))
        places = (kept + position).astype(np.uint64)
        places[outcome[kept] == Outcome.FAILED] |= _FAILED
        yield table[KEY_HIGH].to_numpy()[kept], table[KEY_LOW].to_numpy()[kept], places
        position += table.num_rows


def _scatter(waiting: Sequence[_Entries], files: Sequence[Any]) -> None:
    """Append entries to the files of their buckets."""
    entries = np.stack([np.concatenate(column) for column in zip(*waiting)], axis=1)
    bucket = (entries[:, 0] >> np.uint64(64 - _BUCKET_BITS)).astype(np.uint8)
    sorted_entries = entries[np.argsort(bucket, kind="stable")]
    ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
    for file, own in zip(files, np.split(sorted_entries, ends[:-1])):
        file.write(own)


def _write_sorted(columns: Sequence[Numbers], files: Sequence[Any]) -> None:
    """Append the columns of entries to files, sorted by key, the first of each key."""
    high, low, places = columns
    order = np.argsort(high)  # much faster than lexsort
    found = high[order]
    same = np.zeros(len(found) + 1, np.bool_)
    same[1:-1] = found[1:] == found[:-1]
    if same.any():
        tied = np.flatnonzero(same[1:] | same[:-1])
        among = order[tied]
        order[tied] = among[np.lexsort((places[among], low[among], high[among]))]
        order = order[~(same[:-1] & (low[order] == np.roll(low[order], 1)))]
    for column, file in zip(columns, files):
        file.write(column[order])
