"""Row indexes: what is found in them, and when they are built and deleted."""

from __future__ import annotations

import os
import tempfile
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vane_dagster.errors import DamagedPartError, StoreError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.row_records import Outcome, RecordedPart, records_schema, write_records
from vane_dagster.worker import node_files, row_index
from vane_dagster.worker.row_index import Found, id_hashes, open_index

Record = tuple[int, int, int, int, int]  # high, low, id, outcome, epoch
Row = tuple[int, int, int]  # high, low, id
FLOOR = 2


def recorded(folder: Path, records: Sequence[Record], key: str = "a") -> RecordedPart:
    columns = list(zip(*records)) or [()] * 5
    schema = records_schema(pa.int64())
    arrays = [pa.array(v, schema.field(n).type) for n, v in enumerate(columns)]
    arrays += [pa.nulls(len(records), field.type) for field in list(schema)[5:]]
    location = Location(str(folder))
    table = pa.Table.from_arrays(arrays, schema=schema)
    return RecordedPart(location, f"{key}.parquet", write_records(location, key, table))


def found(index: row_index.RowIndex, rows: Sequence[Row], failed: bool, each_once: bool) -> Found:
    high, low = (np.array([row[n] for row in rows], np.uint64) for n in (0, 1))
    ids = id_hashes(pa.array([row[2] for row in rows], pa.int64()))
    taken = (lambda positions: np.zeros(len(positions), bool)) if each_once else None
    return index.find(high, low, ids, failed=failed, taken=taken)


def expected(
    parts: Sequence[Sequence[Record]], rows: Sequence[Row], failed: bool, each_once: bool
) -> list[tuple[int, int]]:
    of_key: dict[tuple[int, int], list[tuple[bool, int, int, int]]] = {}
    for part, records in enumerate(parts):
        for number, (high, low, id_, outcome, epoch) in enumerate(records):
            hidden = outcome == Outcome.PASSING or (outcome == Outcome.FAILED and not failed)
            if epoch >= FLOOR and not hidden:
                entry = (outcome == Outcome.FAILED, part, number, id_)
                of_key.setdefault((high, low), []).append(entry)
    for entries in of_key.values():
        entries.sort()
    result = [(-1, -1)] * len(rows)
    for same_id in (True, False) if each_once else (False,):
        for n, (high, low, id_) in enumerate(rows):
            entries = of_key.get((high, low), [])
            fitting = [e for e in entries if e[3] == id_ or not same_id]
            if result[n][0] < 0 and fitting:
                result[n] = (fitting[0][1], fitting[0][2])
                if each_once:
                    entries.remove(fitting[0])
    return result


NUMBERS = st.sampled_from([0, 1, 1 << 58, (1 << 64) - 1])
IDS = st.integers(0, 4)
RECORDS = st.lists(
    st.tuples(NUMBERS, NUMBERS, IDS, st.integers(0, 3), st.integers(1, 3)), max_size=9
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(RECORDS, max_size=4),
    st.lists(st.tuples(NUMBERS, NUMBERS, IDS), max_size=9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1_000_000]),
)
def test_rows_find_what_a_plain_search_finds(parts, rows, failed, each_once, in_memory):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_index, "_IN_MEMORY", in_memory)
        folder = Path(name)
        group = [recorded(folder, records, f"p{n}") for n, records in enumerate(parts)]
        result = found(open_index(group, FLOOR, folder), rows, failed, each_once)
        assert [*zip(result.part, result.record)] == expected(parts, rows, failed, each_once)


def test_ids_of_different_types_never_match():
    kinds = (pa.int32(), pa.int64(), pa.uint64(), pa.string(), pa.large_string())
    hashes = [id_hashes(pa.array([7]).cast(kind))[0] for kind in kinds]
    assert len(set(hashes)) == len(kinds)
    chunked = pa.chunked_array([[1], [2, 3]])
    assert id_hashes(chunked).tolist() == id_hashes(pa.array([1, 2, 3])).tolist()


def test_an_index_is_built_once_and_by_records_and_floor(tmp_path):
    parts = [recorded(tmp_path, [(1, 1, 1, 0, 5)])]
    indexes = tmp_path / "indexes"
    indexes.mkdir()
    first = open_index(parts, 1, indexes)
    Path(tmp_path, parts[0].records).unlink()
    assert open_index(parts, 1, indexes) is first
    row_index._opened.clear()
    assert found(open_index(parts, 1, indexes), [(1, 1, 1)], False, True).part.tolist() == [0]
    with pytest.raises(DamagedPartError, match=parts[0].records):
        open_index(parts, 2, indexes)
    assert (
        len([path for path in indexes.iterdir() if path.is_dir() and path.name != ".partial"]) == 1
    )


def test_damaged_records_leave_nothing_behind(tmp_path):
    part = recorded(tmp_path, [(1, 1, 1, 0, 5)])
    path = tmp_path / part.records
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedPartError):
        open_index([part], 1, tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir() and path.name != ".partial"] == []


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    part = recorded(tmp_path, [(1, 1, 1, 0, 5)])
    usage = namedtuple("usage", "total used free")(10, 4, 6)
    monkeypatch.setattr(node_files.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(StoreError, match=r"A row index needs 32 bytes .* 6 are free\. Make room"):
        open_index([part], 1, tmp_path)


def test_an_index_that_nobody_used_for_a_day_is_deleted(tmp_path):
    part = recorded(tmp_path, [(1, 1, 1, 0, 5)])
    old = open_index([part], 1, tmp_path)
    used = next(tmp_path.glob("*.used"))
    past = used.stat().st_mtime - node_files.UNUSED_SECONDS - 60
    os.utime(used, (past, past))
    (tmp_path / ".cleaned").unlink()
    open_index([part], 2, tmp_path)
    assert (
        len([path for path in tmp_path.iterdir() if path.is_dir() and path.name != ".partial"]) == 1
    )
    assert not used.exists()
    assert found(old, [(1, 1, 1)], False, False).record.tolist() == [0]


def test_many_indexes_are_not_searched_for_old_ones_each_time(tmp_path, monkeypatch):
    part = recorded(tmp_path, [(1, 1, 1, 0, 5)])
    listed = []
    listing = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *given_: listed.append(given_[0]) or listing(*given_))
    for floor in range(5):
        open_index([part], floor, tmp_path)
    assert listed.count(tmp_path) == 1
    assert {*listed} == {tmp_path, tmp_path / ".partial"}


@pytest.mark.parametrize("left", [None, 0, 2, -8])
@pytest.mark.parametrize("file", [*row_index._ARRAYS, row_index._STARTS])
def test_an_incomplete_index_is_built_again(tmp_path, file, left):
    part = recorded(tmp_path / "store", [(n, 1, 1, Outcome.OUTPUT, 1) for n in range(3)])
    open_index([part], 1, tmp_path)
    row_index._opened.clear()
    (stored,) = tmp_path.glob(f"*/{file}")
    if left is None:
        stored.unlink()
    else:
        stored.write_bytes(stored.read_bytes()[:left])
    again = open_index([part], 1, tmp_path)
    assert found(again, [(2, 1, 1)], False, False).record.tolist() == [2]
