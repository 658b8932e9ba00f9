"""The groups of parts in which the fragments of a run look."""

from __future__ import annotations

import math

import pytest

from vane_dagster.engine.row_lookups import written_groups
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import PartInfo


def groups(parts: int, found: int = 0) -> list[list[str]]:
    """The keys of the parts of each group, after a number of parts were written."""
    folder = Location("memory://parts")
    infos = [PartInfo(f"{n}", "digest", 1, 1, row_records=f"{n}.rows") for n in range(parts)]
    made = list(written_groups([Part(folder, info) for info in infos], found, "id"))
    assert all(group.is_own and group.id == "id" for group in made)
    return [[part.records.partition(".")[0] for part in group.parts] for group in made]


@pytest.mark.parametrize("parts", [0, 1, 7, 8, 9, 63, 64, 100, 577])
def test_each_part_is_in_one_group_and_there_are_few(parts):
    found = groups(parts)
    assert [key for group in found for key in group] == [f"{n}" for n in range(parts)]
    assert len(found) <= 7 * (1 + math.log(max(parts, 1), 8))


def test_a_part_is_in_few_groups_while_a_run_writes():
    every = {tuple(group) for parts in range(300) for group in groups(parts)}
    assert sum("5" in group for group in every) <= 3


def test_parts_that_were_found_are_one_group():
    assert groups(5, found=3) == [["0", "1", "2"], ["3"], ["4"]]
    assert groups(2, found=3) == [["0", "1"]]
