"""Row indexes: what they find is what a dictionary of all records would."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vane_dagster as vd
from vane_dagster.errors import DamagedPartError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import (
    Outcome,
    RecordedPart,
    records_schema,
    write_records,
)
from vane_dagster.worker import node_folders, row_index
from vane_dagster.worker.row_index import Found, RowIndex, id_hashes

Record = tuple[int, int, str, int, int]
"""High and low half of the key, id, outcome, epoch."""


@pytest.fixture(autouse=True)
def _closed(monkeypatch):
    monkeypatch.setattr(row_index, "_opened", {})


def open_index(parts: list[RecordedPart], floor: int, folder: Path) -> RowIndex:
    folder.mkdir(exist_ok=True)
    return row_index.open_index(parts, floor, folder)


def part(folder: Path, records: list[Record], number: int = 0) -> RecordedPart:
    columns = list(zip(*records)) or [()] * 5
    table = pa.table(
        {
            "key_high": pa.array(columns[0], pa.uint64()),
            "key_low": pa.array(columns[1], pa.uint64()),
            "id": pa.array(columns[2], pa.string()),
            "outcome": pa.array(columns[3], pa.uint8()),
            "epoch": pa.array(columns[4], pa.uint32()),
            **{name: pa.array(["x"] * len(records)).dictionary_encode()
               for name in ("run_id", "model", "code")},
            "at": pa.array([0] * len(records), pa.timestamp("us", "UTC")),
        }
    ).cast(records_schema(pa.string()))  # fmt: skip
    key = f"{number:040}"
    location = Location(str(folder))
    return RecordedPart(location, f"{key}-0.parquet", write_records(location, key, table))


def keys(rows: list[tuple[int, int, str]]) -> tuple[Any, Any, Any]:
    high, low, ids = zip(*rows) if rows else ((), (), ())
    return (
        np.array(high, np.uint64), np.array(low, np.uint64), id_hashes(pa.array(ids, pa.string())),
    )  # fmt: skip


def places(found: Found) -> list[tuple[int, int] | None]:
    pairs = zip(found.part.tolist(), found.record.tolist())
    return [None if pair[0] < 0 else pair for pair in pairs]


SMALL = st.integers(0, 3)
IDS = st.sampled_from("abcdef")
RECORDS = st.lists(
    st.tuples(SMALL, SMALL, IDS, st.integers(0, 3), st.integers(0, 2)),
    max_size=12,
    unique_by=lambda record: record[2],
)
ROWS = st.lists(st.tuples(SMALL, SMALL, IDS), max_size=12)


@given(groups=st.lists(RECORDS, max_size=3), rows=ROWS, failed=st.booleans(), held=st.booleans())
def test_any_record_with_the_key_is_found_one_with_an_output_first(
    tmp_path_factory, groups, rows, failed, held
):
    folder = tmp_path_factory.mktemp("parts")
    parts = [part(folder, records, number) for number, records in enumerate(groups)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "_HELD_ROWS", 1 << 20 if held else 2)
        index = open_index(parts, 1, folder / "indexes")
    found = index.find(*keys(rows), failed=failed, each_once=False)
    for row, place in zip(rows, places(found)):
        fitting = [
            record
            for records in groups
            for record in records
            if record[:2] == row[:2] and record[4] >= 1 and record[3] < (3 if failed else 2)
        ]
        assert (place is None) == (not fitting)
        if place is not None:
            chosen = groups[place[0]][place[1]]
            assert chosen in fitting
            assert (chosen[3] == Outcome.FAILED) == all(r[3] == 2 for r in fitting)


@given(groups=st.lists(RECORDS, max_size=2), rows=ROWS, failed=st.booleans())
def test_each_record_serves_one_row_and_first_that_with_its_id(
    tmp_path_factory, groups, rows, failed
):
    rows = list({row[2]: row for row in rows}.values())  # ids are unique
    seen: set[str] = set()
    groups = [[r for r in records if not (r[2] in seen or seen.add(r[2]))] for records in groups]
    folder = tmp_path_factory.mktemp("parts")
    parts = [part(folder, records, number) for number, records in enumerate(groups)]
    index = open_index(parts, 0, folder / "indexes")
    found = places(index.find(*keys(rows), failed=failed, each_once=True))
    taken = [place for place in found if place is not None]
    assert len(set(taken)) == len(taken)
    stored = [r for records in groups for r in records if r[3] < (3 if failed else 2)]
    served = Counter(row[:2] for row, place in zip(rows, found) if place is not None)
    assert served == Counter(row[:2] for row in rows) & Counter(r[:2] for r in stored)
    for row, place in zip(rows, found):
        if place is not None:
            assert groups[place[0]][place[1]][:2] == row[:2]
        own = [r for r in stored if r[:3] == row]
        if own:
            assert place is not None
            assert groups[place[0]][place[1]][2] == row[2]


def test_a_key_of_very_many_records_is_searched_not_scanned(tmp_path, monkeypatch):
    many = [(1, 1, f"{n}", 0, 0) for n in range(5000)]
    index = open_index([part(tmp_path, many)], 0, tmp_path / "indexes")
    reads = []
    entries = index._entries

    class Counted:
        def __getitem__(self, place):
            reads.append(place)
            return entries[place]

    monkeypatch.setattr(index, "_entries", Counted())
    rows = [(1, 1, "4321"), (1, 1, "new"), (1, 1, "17")]
    found = index.find(*keys(rows), failed=False, each_once=True)
    assert [place and place[1] for place in places(found)][::2] == [4321, 17]
    assert found.part[1] == 0, "a row with another id gets one of the others"
    assert len(reads) < 200


def test_ids_of_other_types_are_others():
    assert id_hashes(pa.array([1])) != id_hashes(pa.array(["1"]))
    assert len(id_hashes(pa.array([], pa.string()))) == 0


def test_an_index_is_made_once_and_shared(tmp_path, monkeypatch):
    parts = [part(tmp_path, [(1, 2, "a", 0, 0)])]
    open_index(parts, 0, tmp_path / "indexes")
    shutil.move(tmp_path / parts[0].records, tmp_path / "gone")
    monkeypatch.setattr(row_index, "_opened", {})
    index = open_index(parts, 0, tmp_path / "indexes")
    assert places(index.find(*keys([(1, 2, "b")]), failed=False, each_once=False)) == [(0, 0)]
    with pytest.raises(DamagedPartError):
        open_index(parts, 1, tmp_path / "indexes")  # another floor is another index
    left = [path.name for path in (tmp_path / "indexes").iterdir() if path.is_dir()]
    assert len(left) == 1


def test_indexes_that_nobody_used_for_a_day_and_unfinished_ones_are_removed(tmp_path, monkeypatch):
    first, second = part(tmp_path, [(1, 2, "a", 0, 0)]), part(tmp_path, [(3, 4, "b", 0, 0)], 1)
    folder = tmp_path / "indexes"
    open_index([first], 0, folder)
    (old,) = [path for path in folder.iterdir() if path.is_dir()]
    monkeypatch.setattr(row_index, "_opened", {})
    for descriptor in node_folders._in_use.values():
        os.close(descriptor)
    node_folders._in_use.clear()
    os.utime(folder / f"{old.name}.used", (0, 0))
    (folder / f"{old.name}.partial-killed").mkdir()
    open_index([second], 0, folder)
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert len(names) == 1
    assert old.name not in names


def test_a_full_disk_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(row_index, "_HELD_ROWS", 0)
    monkeypatch.setattr(row_index.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(vd.StoreError, match=r"an index of stored rows has no room in .* TMPDIR"):
        open_index([part(tmp_path, [(1, 2, "a", 0, 0)])], 0, tmp_path / "indexes")
