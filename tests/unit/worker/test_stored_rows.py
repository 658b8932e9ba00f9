"""Rows of a part that are copied: read from the part, or from mapped files of the node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.row_records import Outcome, RecordedPart, records_schema, write_records
from vane_dagster.worker import recorded_rows
from vane_dagster.worker.recorded_rows import StoredRows

IDS = ["a", "b", "c", "d"]
OUTCOMES = [Outcome.OUTPUT, Outcome.FILTERED, Outcome.OUTPUT, Outcome.FAILED]
WORDS = [("c", 0, [3.0]), ("a", 0, [1.0]), ("a", 1, None), ("d", 0, None)]
"""Output rows, of which those of "d" are nulls in the place of a failed row."""


@pytest.fixture
def part(tmp_path) -> RecordedPart:
    folder = Location(str(tmp_path / "store"))
    schema = records_schema(pa.string())
    keys = dict.fromkeys(("key_high", "key_low"), range(4))
    columns = {"id": IDS, "outcome": OUTCOMES, "run_id": ["x", "y", "x", "y"], **keys}
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    records = write_records(folder, "k", pa.Table.from_pylist(rows, schema))
    names = ("id", "n", "values")
    kinds = [pa.string(), pa.int64(), pa.list_(pa.float32(), 1)]
    table = pa.Table.from_pylist(
        [dict(zip(names, row)) for row in WORDS], pa.schema(list(zip(names, kinds)))
    )
    info = write_part(table, PartTarget(folder, "k", "id"))
    return RecordedPart(folder, info.name, records, rows=1000)


def read(part: RecordedPart, folder: Path, wanted: int = 1) -> StoredRows:
    return recorded_rows.stored_rows(part, "id", ["n", "values"], wanted, folder)


@pytest.mark.parametrize("wanted", [1, 125])
def test_rows_come_in_the_order_that_is_asked_for(tmp_path, part, wanted):
    for _ in range(2):
        records, values, count = read(part, tmp_path, wanted).take(np.array([2, 0, 3, 1, 0]))
        assert records["id"].to_pylist() == ["c", "a", "d", "b", "a"]
        assert records["run_id"].to_pylist() == ["x", "x", "y", "y", "x"]
        assert count.tolist() == [1, 2, 0, 0, 2]
        assert values.to_pylist() == [
            {"n": n, "values": v}
            for n, v in [(0, [3.0]), (0, [1.0]), (1, None), (0, [1.0]), (1, None)]
        ]
    assert bool(list(tmp_path.glob("*.used"))) == (wanted == 1)


def test_a_part_is_decoded_once_for_the_node(tmp_path, part):
    read(part, tmp_path)
    for file in (tmp_path / "store").iterdir():
        file.unlink()
    assert read(part, tmp_path).take(np.array([0]))[2].tolist() == [2]


def test_rows_are_read_from_the_part_if_the_node_has_no_room(tmp_path, part, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorded_rows, "write_table", full)
    assert read(part, tmp_path).take(np.array([0]))[2].tolist() == [2]
    assert not list(tmp_path.glob("*/values"))
