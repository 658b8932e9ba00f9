"""Admission by measured bytes: what is known of fragments."""

from __future__ import annotations

from typing import Any

import vane_dagster as vd
from support.data import same
from vane_dagster.engine.fragment_state import FragmentState, bytes_read, make_task_states
from vane_dagster.engine.memory_budget import MemoryBudget
from vane_dagster.planning.plan import Part
from vane_dagster.storage.manifest import FragmentRecord, PartInfo

MIB = 1 << 20


def fragments(count: int, mib: int = 10, read_mib: int = 0) -> list[FragmentState]:
    """Fragments of `mib` MiB: a wide project and a map, joined."""
    pipeline = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    quick = pipeline.project("quick", ["id"])
    slow = pipeline.map_batches("slow", same, schema={"x": "BIGINT"})
    pipeline.join("joined", quick, slow)
    specs = [stage.spec for stage in pipeline.stages.values()]
    made = []
    for order in range(count):
        record = FragmentRecord("file:///a", 0, 1, str(order), mib * MIB)
        fragment = FragmentState(0, order, record, make_task_states(pipeline, specs))
        fragment.bytes_read = read_mib * MIB
        made.append(fragment)
    return made


def finish(budget: MemoryBudget, fragment: FragmentState, mib: int) -> None:
    """A fragment comes to its end, which held `mib` MiB at most."""
    budget.charge(fragment)
    budget.record_table(fragment, mib * MIB)
    for task_state in fragment.task_states.values():
        task_state.done = True
    budget.release(fragment)


def admitted(budget: MemoryBudget, waiting: list[FragmentState]) -> int:
    count = 0
    while waiting and budget.has_room_for(waiting[0]):
        budget.charge(waiting.pop(0))
        count += 1
    return count


def test_a_large_expansion_is_assumed_until_a_fragment_has_come_through():
    budget, (first, *waiting) = MemoryBudget(1000 * MIB, 100), fragments(50)
    assert admitted(budget, list(waiting)) == 3, "32 times 10 MiB each"
    finish(budget, first, 40)
    assert admitted(budget, waiting[3:]) == 25 - 3, "40 MiB each"


def test_a_fragment_that_outgrows_what_was_expected_stops_admission_and_those_after_it():
    budget, (known, *waiting) = MemoryBudget(1000 * MIB, 100), fragments(50)
    finish(budget, known, 30)
    first, second, third = waiting[:3]
    assert admitted(budget, waiting[:20]) == 20
    assert budget.has_room_for(waiting[20])
    assert budget.last_to_continue() >= third.place
    budget.record_table(first, 400 * MIB)
    assert not budget.has_room_for(waiting[20])
    assert budget.last_to_continue() == second.place, "800 MiB"
    budget.release(first)
    assert budget.last_to_continue() >= third.place


def test_parts_that_a_wave_begins_with_count_as_its_source():
    assert admitted(MemoryBudget(1000 * MIB, 100), fragments(50, mib=1, read_mib=10)) == 3
    pipeline = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    low = pipeline.project("low", ["id"])
    mid = low.project("mid", ["id"])
    pipeline.join("joined", low, mid, columns={"low": [], "mid": []})
    folder: Any = None
    parts = {(2, "low"): {5: Part(folder, PartInfo("k", "d", 1, 700))}}
    specs = [pipeline[name].spec for name in ("mid", "joined")]
    assert bytes_read(parts, 2, 5, specs) == 700
    assert bytes_read({}, 2, 5, [low.spec]) == 0
