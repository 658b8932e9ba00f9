"""Row indexes: the row records of a group of parts, searchable by key.

An index is a folder on the node's disk, made once of the group's row records: two files, sorted by
key and mapped into memory, so that neither making nor searching one holds all records in memory.
"""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster._private_folder import temporary_root, worker_folder
from vane_dagster.errors import StoreError
from vane_dagster.storage.row_keys import row_keys
from vane_dagster.storage.row_records import (
    EPOCH,
    ID,
    KEY_HIGH,
    KEY_LOW,
    OUTCOME,
    Outcome,
    RecordedPart,
    read_records,
)
from vane_dagster.worker.node_folders import making, replacing

KIND = "row_indexes"
"""The kind of the worker's private folder."""
_FORMAT = 1
_HIGH, _ENTRIES = "high.bin", "entries.bin"
_KEY = np.dtype("<u8")
_ENTRY = np.dtype(
    [("low", "<u8"), ("id", "<u8"), ("part", "<u4"), ("record", "<u4"), ("outcome", "u1")]
)
_BUCKETS = 256
_HELD_ROWS = 1 << 20
"""Records that are held in memory while an index is made."""
_MAX_OPENED = 16

_Keys = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[Any]


_opened: dict[tuple[Path, str], RowIndex] = {}
"""The indexes that this process uses, the last used at the end."""


@dataclass(frozen=True)
class Found:
    """The records that were found for rows, as arrays of one entry a row.

    Attributes:
        part: The position of the part in the group; -1 if no record was found.
        record: The position of the record in the part's row records.
        outcome: The outcome, as an `Outcome`.
    """

    part: npt.NDArray[np.int32]
    record: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.uint8]


def id_hashes(ids: pa.Array) -> _Keys:
    """Return 64 bits of each id; those of ids of different types differ."""
    keys = row_keys([ids])
    return np.frombuffer(keys.buffers()[1] or b"", "<u8").reshape(-1, 2)[:, 0].copy()


def open_index(parts: Sequence[RecordedPart], floor: int, folder: Path | None = None) -> RowIndex:
    """Open the index of a group of parts, and make it first if the node has none.

    Records of failures that may pass, and those of an earlier epoch than `floor`, are left out.

    Args:
        parts: The parts.
        floor: The first epoch.
        folder: The parent of all indexes. Default: the worker's private folder.

    Raises:
        DamagedPartError: If row records are damaged or gone.
        StoreError: If the file system refuses, or has no room.
    """
    urls = "\n".join(part.folder.file_url(part.records) for part in parts)
    digest = hashlib.sha256(f"{_FORMAT}\n{floor}\n{urls}".encode()).hexdigest()[:40]
    parent = folder or worker_folder(KIND)
    if (found := _opened.pop((parent, digest), None)) is None:
        with making(parent, digest) as path:
            if not path.exists():
                with replacing(path) as made:
                    _make(made, parts, floor)
            found = RowIndex(path)
    _opened[parent, digest] = found
    if len(_opened) > _MAX_OPENED:
        del _opened[next(iter(_opened))]
    return found


class RowIndex:
    """An index that exists.

    Args:
        folder: Its folder.
    """

    def __init__(self, folder: Path) -> None:
        self._high = _mapped(folder / _HIGH, _KEY)
        self._entries = _mapped(folder / _ENTRIES, _ENTRY)

    def __len__(self) -> int:
        return len(self._high)

    def find(self, high: _Keys, low: _Keys, ids: _Keys, *, failed: bool, each_once: bool) -> Found:
        """Find a record for each row.

        Args:
            high: The high halves of the rows' keys.
            low: The low halves.
            ids: The rows' ids, as `id_hashes` returned them; used for `each_once`.
            failed: Whether records of failures may be found.
            each_once: Whether a record serves one row at most: first a row with the same id, then
                the others in order. Else any record serves all rows with its key, one with an
                output before one of a failure.
        """
        order = np.lexsort((low, high))
        high, low = high[order], low[order]
        starts = np.flatnonzero(np.r_[True, (high[1:] != high[:-1]) | (low[1:] != low[:-1])])
        starts = starts[: len(order)]
        counts = np.diff(np.r_[starts, len(order)])
        first = np.searchsorted(self._high, high[starts])
        is_known = (first < len(self._high)) & (self._high_at(first) == high[starts])
        is_repeated = is_known & (self._high_at(first + 1) == high[starts])
        for group in np.flatnonzero(is_repeated).tolist():  # others may share the high half
            begin, end = self._range(int(first[group]), low[starts[group]])
            first[group], is_known[group] = begin, begin < end
        place = np.where(is_known, first, -1)
        place[is_known] = self._usable(place[is_known], low[starts][is_known], failed)
        places = np.full(len(order), -1, np.int64)
        places[order] = np.repeat(place, counts)
        if each_once:
            for group in np.flatnonzero(is_known & (is_repeated | (counts > 1))).tolist():
                rows = order[starts[group] : starts[group] + counts[group]]
                key = (int(first[group]), low[starts[group]])
                places[rows] = self._each_once(*key, ids[rows].tolist(), failed)
        return self._found(places)

    def _high_at(self, places: _Numbers) -> _Keys:
        """Return the high halves of entries; 0 beyond the last one, which then has no match."""
        found = np.zeros(len(places), np.uint64)
        is_there = places < len(self._high)
        found[is_there] = self._high[places[is_there]]
        return found

    def _usable(self, places: _Numbers, low: _Keys, failed: bool) -> _Numbers:
        """Return the places of entries that have the low half and may be found; else -1.

        Entries of one key begin with those that have an output.
        """
        entries = self._entries[places]
        usable: npt.NDArray[np.bool_] = entries["low"] == low
        if not failed:
            usable &= entries["outcome"] != Outcome.FAILED
        return np.where(usable, places, -1)

    def _range(self, first: int, low: np.uint64) -> tuple[int, int]:
        """Return the range of entries with the high half of one of them and with a low half."""
        entries = self._entries
        last = bisect_right(self._high, self._high[first], first)
        begin = bisect_left(range(last), low, first, key=lambda i: entries[i]["low"])
        return begin, bisect_right(range(last), low, begin, key=lambda i: entries[i]["low"])

    def _each_once(self, first: int, low: np.uint64, ids: Sequence[int], failed: bool) -> list[int]:
        """Return the places of different entries of a key for some rows; -1 for what is left.

        Entries with an output, and those of failures, are each sorted by their ids.
        """
        entries = self._entries
        begin, end = self._range(first, low)
        middle = bisect_left(
            range(end), True, begin, key=lambda i: bool(entries[i]["outcome"] == Outcome.FAILED)
        )
        end = end if failed else middle
        places = [-1] * len(ids)
        for start, stop in ((begin, middle), (middle, end)):
            for row, id in enumerate(ids):
                at = bisect_left(range(stop), id, start, key=lambda i: int(entries[i]["id"]))
                if at < stop and int(entries[at]["id"]) == id:
                    places[row] = at
        taken = set(places)
        free = (place for place in range(begin, end) if place not in taken)
        return [place if place >= 0 else next(free, -1) for place in places]

    def _found(self, places: _Numbers) -> Found:
        is_found = places >= 0
        entries = self._entries[places[is_found]]
        found = Found(
            np.full(len(places), -1, np.int32),
            np.full(len(places), -1, np.int64),
            np.zeros(len(places), np.uint8),
        )
        for name in ("part", "record", "outcome"):
            getattr(found, name)[is_found] = entries[name]
        return found


def _mapped(file: Path, kind: np.dtype[Any]) -> _Numbers:
    if not file.stat().st_size:
        return np.empty(0, kind)
    return np.memmap(file, kind, "r")


def _make(folder: Path, parts: Sequence[RecordedPart], floor: int) -> None:
    """Write the files of an index: in one piece, or by buckets of keys if there are many."""
    held: list[_Numbers] = []
    buckets: Path | None = None
    for entries in _read(parts, floor):
        held.append(entries)
        if sum(map(len, held)) > _HELD_ROWS:
            buckets = folder / "buckets"
            buckets.mkdir(exist_ok=True)
            _scatter(np.concatenate(held), buckets)
            held = []
    with open(folder / _HIGH, "wb") as high, open(folder / _ENTRIES, "wb") as rest:
        for entries in _gathered(held, buckets):
            ordered = entries[_order(entries)]
            ordered["high"].tofile(high)
            ordered[list(_ENTRY.names or ())].astype(_ENTRY).tofile(rest)
    if buckets is not None:
        shutil.rmtree(buckets)


_WITH_KEY = np.dtype([("high", "<u8"), *_ENTRY.descr])


def _read(parts: Sequence[RecordedPart], floor: int) -> Iterator[_Numbers]:
    """Yield the entries of each part's records."""
    for number, part in enumerate(parts):
        columns = [KEY_HIGH, KEY_LOW, OUTCOME, EPOCH, ID]
        records = read_records(part.folder, part.records, columns)
        outcome = records.column(OUTCOME).to_numpy()
        usable = (outcome != Outcome.PASSING) & (records.column(EPOCH).to_numpy() >= floor)
        entries = np.empty(records.num_rows, _WITH_KEY)
        entries["high"] = records.column(KEY_HIGH).to_numpy()
        entries["low"] = records.column(KEY_LOW).to_numpy()
        entries["id"] = id_hashes(records.column(ID).combine_chunks())
        entries["part"], entries["outcome"] = number, outcome
        entries["record"] = np.arange(records.num_rows)
        yield entries[usable]


def _scatter(entries: _Numbers, folder: Path) -> None:
    """Append entries to the files of their buckets."""
    free = shutil.disk_usage(folder).free
    if free < 3 * entries.nbytes:
        raise StoreError(
            f"an index of stored rows has no room in {str(folder)!r} of this node, where {free:,} "
            f"bytes are free. Make room, or set TMPDIR of the workers (now "
            f"{str(temporary_root())!r}) to a folder of a larger disk"
        )
    bucket = (entries["high"] >> np.uint64(56)).astype(np.uint8)
    order = np.argsort(bucket, kind="stable")
    ends = np.cumsum(np.bincount(bucket, minlength=_BUCKETS))
    for number, some in enumerate(np.split(entries[order], ends[:-1])):
        if len(some):
            with open(folder / f"{number:03}", "ab") as file:
                some.tofile(file)


def _gathered(held: Sequence[_Numbers], buckets: Path | None) -> Iterator[_Numbers]:
    """Yield all entries, those of a bucket together, in the order of the buckets."""
    rest = np.concatenate(held) if held else np.empty(0, _WITH_KEY)
    if buckets is None:
        yield rest
        return
    if len(rest):
        _scatter(rest, buckets)
    for file in sorted(buckets.iterdir()):
        yield np.fromfile(file, _WITH_KEY)
        file.unlink()


def _order(entries: _Numbers) -> _Numbers:
    """Return the order by key, then those with an output first, then by id."""
    order = np.argsort(entries["high"], kind="stable")
    high = entries["high"][order]
    is_equal = np.zeros(len(order), bool)
    is_equal[1:] = high[1:] == high[:-1]
    if not is_equal.any():
        return order
    is_equal[:-1] |= is_equal[1:]
    some = order[is_equal]
    failed = entries["outcome"][some] == Outcome.FAILED
    some_of = entries[some]
    order[is_equal] = some[np.lexsort((some_of["id"], failed, some_of["low"], some_of["high"]))]
    return order
