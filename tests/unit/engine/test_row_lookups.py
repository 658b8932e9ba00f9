"""The groups of parts in which the fragments of a run look, and which partitions wait."""

from __future__ import annotations

import math
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.engine import row_lookups
from vane_dagster.engine.row_lookups import RowLookups, written_groups
from vane_dagster.engine.run_state import RunState
from vane_dagster.pipeline.records import Reuse
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.worker.protocol import RecordGroup, RowLookup
from vane_dagster.worker.reports import WorkReport


def groups(parts: int, found: int = 0) -> list[list[str]]:
    """The keys of the parts of each group, after a number of parts were written."""
    folder = StoragePath("memory://parts")
    infos = [
        PartInfo(f"{n}", "digest", 1, 1, rows_in=10, row_records=f"{n}.rows") for n in range(parts)
    ]
    made = list(written_groups([Part(folder, info) for info in infos], found, "id", {}))
    assert all(group.is_own and group.id == "id" for group in made)
    return [[part.records.partition(".")[0] for part in group.parts] for group in made]


@pytest.mark.parametrize("parts", [0, 1, 7, 8, 9, 63, 64, 100, 577])
def test_each_part_is_in_one_group_and_there_are_few(parts):
    found = groups(parts)
    assert [key for group in found for key in group] == [f"{n}" for n in range(parts)]
    assert len(found) <= 7 * (1 + math.log(max(parts, 1), 8))


def test_parts_that_were_found_are_one_group_unless_they_have_many_rows(monkeypatch):
    assert groups(5, found=3) == [["0", "1", "2"], ["3"], ["4"]]
    assert groups(2, found=3) == [["0", "1"]]
    monkeypatch.setattr(row_lookups, "_GROUP_ROWS", 25)
    assert groups(5, found=3) == [["0", "1"], ["2"], ["3"], ["4"]]
    monkeypatch.setattr(row_lookups, "_GROUP_ROWS", 5)
    assert groups(2, found=2) == [["0"], ["1"]]


def test_groups_are_made_and_encoded_once_for_all_fragments():
    """Each fragment of a partition is sent with them, and there may be thousands of parts."""
    folder, made = StoragePath("memory://parts"), dict[Any, list[RecordGroup]]()
    infos = [PartInfo(f"{n}", "d", 1, 1, row_records=f"{n}.rows") for n in range(72)]
    parts = [Part(folder, info) for info in infos]
    first, *_ = written_groups(parts[:64], 0, "id", made)
    again, *others = written_groups(parts, 0, "id", made)
    assert again is first
    assert len(first.parts) == 64
    assert [len(group.parts) for group in others] == [8]
    received = [pickle.loads(pickle.dumps(again)) for _ in range(2)]
    assert received[0] is received[1]
    assert received[0] == first
    assert first.__reduce__()[1][1] is again.__reduce__()[1][1]
    del parts[3]  # a damaged part was removed
    (other,) = written_groups(parts[:64], 0, "id", made)
    assert infos[3].row_records not in [part.records for part in other.parts]


class Days:
    """Partitions of a run with one fragment each, each of which looks in the one before."""

    def __init__(self, count: int, forced: bool = False) -> None:
        keys = [f"day{n:02}" for n in range(count)]
        spec: Any = SimpleNamespace(name="m", runs_udf=True, reuse=Reuse("rows"))
        planned = [
            SimpleNamespace(
                key=key, fragments=[0], stages={"m": SimpleNamespace(done=None, row_definition="d")}
            )
            for key in keys
        ]
        self.parts: dict[Any, dict[int, str]] = {(n, "m"): {} for n in range(count)}
        state: Any = SimpleNamespace(
            plan=SimpleNamespace(partitions=planned, forced=forced),
            pipeline={"m": SimpleNamespace(spec=spec)},
            _nearest=lambda key, n: keys[: keys.index(key)][::-1][:n],
            parts=self.parts,
            failed={},
            pending=set(),
            damaged={},
        )
        state.searched, state.due = partial(RunState.searched, state), partial(RunState.due, state)
        self.state, self.lookups = state, RowLookups(state)

    def waiting(self) -> list[int]:
        return [n for (n, _) in self.parts if self.lookups.must_wait(n, ["m"])]

    def write(self, day: int, rows: int, found: int) -> None:
        """Load and write a partition; so many of its rows are found in the one before."""
        looked_in = RowLookup((RecordGroup((), "id", is_own=False),))
        run: Any = SimpleNamespace(partition=day, known={"m": looked_in})
        self.lookups.record(run, "m", WorkReport(rows_out=rows, found_elsewhere=found))
        self.parts[day, "m"][0] = "part"


def test_a_partition_waits_for_the_one_before():
    days = Days(4)
    assert days.waiting() == [1, 2, 3]
    days.write(0, 100, 0)
    assert days.waiting() == [], "the first has found nothing elsewhere"
    assert Days(4, forced=True).waiting() == []


@pytest.mark.parametrize(("found", "waiting"), [(5, [3]), (4, [])])
def test_partitions_wait_as_long_as_a_twentieth_of_the_rows_is_found(found, waiting):
    days = Days(4)
    days.parts[0, "m"][0] = "part"
    days.write(1, 100, found)
    assert days.waiting() == waiting


def test_nobody_waits_for_a_partition_that_failed_or_has_a_damaged_part():
    for name, place in (("failed", (0, "m")), ("damaged", (0, 0))):
        days = Days(2)
        getattr(days.state, name)[place] = "error"
        assert days.waiting() == []
