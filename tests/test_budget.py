"""Admission by measured bytes: what is known of fragments, and what makes room for the next."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import read_stage, write_source

import vane_dagster as vd
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.engine import executor
from vane_dagster.engine.fragment_state import FragmentRun, bytes_read, make_nodes
from vane_dagster.engine.memory_budget import Budget
from vane_dagster.engine.tasks import Requests
from vane_dagster.planning.plan import Part
from vane_dagster.storage.manifest import FragmentRecord, PartInfo
from vane_dagster.worker.operations import HeldRows, PartRows

MIB = 1 << 20


def same(batch: pa.Table) -> pa.Table:
    return batch


def runs(count: int, mib: int = 10, read_mib: int = 0) -> list[FragmentRun]:
    """Fragments of `mib` MiB: a wide project and a map, joined."""
    pipeline = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    quick = pipeline.project("quick", ["id"])
    slow = pipeline.map_batches("slow", same, schema={"x": "BIGINT"})
    pipeline.join("joined", quick, slow)
    specs = [stage.spec for stage in pipeline.stages.values()]
    made = []
    for order in range(count):
        record = FragmentRecord("file:///a", 0, 1, str(order), mib * MIB)
        run = FragmentRun(order, 0, order, record, make_nodes(specs))
        run.bytes_read = read_mib * MIB
        made.append(run)
    return made


def finish(budget: Budget, run: FragmentRun, mib: int) -> None:
    """A fragment comes to its end, which held `mib` MiB at most."""
    budget.charge(run)
    budget.take(run, "quick", "whole", mib * MIB)
    for node in run.nodes.values():
        node.done = True
    budget.release(run)


def admitted(budget: Budget, waiting: list[FragmentRun]) -> int:
    """Starts as many fragments as are admitted."""
    count = 0
    while waiting and budget.admits(waiting[0]):
        budget.charge(waiting.pop(0))
        count += 1
    return count


def test_a_large_expansion_is_assumed_until_a_fragment_has_come_through():
    budget, (first, *waiting) = Budget(1000 * MIB, 100), runs(50)
    assert admitted(budget, list(waiting)) == 3, "32 times 10 MiB each"
    finish(budget, first, 40)
    assert admitted(budget, waiting[3:]) == 25 - 3, "40 MiB each"


def test_one_is_always_admitted():
    budget, waiting = Budget(1, 100), runs(2)
    assert admitted(budget, waiting) == 1


def test_fragments_are_counted_too():
    budget, waiting = Budget(1 << 60, 4), runs(9)
    assert admitted(budget, waiting) == 4


def test_a_fragment_that_went_through_some_stages_says_nothing_of_all():
    budget, (resumed, abandoned, alike, *waiting) = Budget(1000 * MIB, 100), runs(50)
    for run in (resumed, alike):
        run.nodes = make_nodes([run.nodes["quick"].spec])
    abandoned.abandon({"slow", "joined"})
    finish(budget, resumed, 20)
    finish(budget, abandoned, 20)
    assert admitted(budget, waiting) == 3
    assert budget.admits(alike), "its like is known: 30 MiB"


def test_mended_fragments_say_nothing_of_whole_ones():
    budget, (mended, *waiting) = Budget(1000 * MIB, 100), runs(50)
    folder: Any = None
    mended.mends["slow"] = Part(folder, PartInfo("key", "digest", 1, 1))
    finish(budget, mended, 20)
    assert admitted(budget, waiting) == 3


def test_a_fragment_that_outgrows_what_was_expected_stops_admission_and_those_after_it():
    budget, (known, *waiting) = Budget(1000 * MIB, 100), runs(50)
    finish(budget, known, 30)
    first, second, third = waiting[:3]
    assert admitted(budget, waiting[:20]) == 20
    assert budget.admits(waiting[20])
    assert budget.lets(third)
    budget.take(first, "slow", "slice", 400 * MIB)
    assert not budget.admits(waiting[20])
    assert budget.lets(first)
    assert budget.lets(second), "800 MiB"
    assert not budget.lets(third)
    budget.release(first)
    assert budget.lets(third)


def test_what_is_dropped_on_the_way_is_not_held():
    (run,) = runs(1)
    slow = run.nodes["slow"]
    run.hold("slow", "load", 5)
    slow.given = object()
    run.hold("slow", "slice", 10)
    slow.pieces[0] = (object(), 1)
    slow.given = None
    run.hold("slow", "slice", 10)
    assert run.held == 20
    run.hold("slow", "gather", 20)
    slow.table, slow.pieces = object(), {}
    assert run.held == 20
    assert run.peak == 40, "the slices, and what they were put together to"
    run.read("slow")
    assert run.held == 0


def test_tiny_sources_are_charged_and_measured_by_a_mebibyte():
    budget, (first, *waiting) = Budget(96 * MIB, 100), runs(50, mib=0)
    assert admitted(budget, list(waiting)) == 3
    finish(budget, first, 12)
    assert admitted(budget, waiting[3:]) == 8 - 3


def test_parts_that_a_wave_begins_with_count_as_its_source():
    assert admitted(Budget(1000 * MIB, 100), runs(50, mib=1, read_mib=10)) == 3
    pipeline = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    low = pipeline.project("low", ["id"])
    mid = low.project("mid", ["id"])
    pipeline.join("joined", low, mid, columns={"low": [], "mid": []})
    folder: Any = None
    parts = {(2, "low"): {5: Part(folder, PartInfo("k", "d", 1, 700))}}
    specs = [pipeline[name].spec for name in ("mid", "joined")]
    assert bytes_read(parts, 2, 5, specs) == 700
    assert bytes_read({}, 2, 5, [low.spec]) == 0


# Rows that wait for a join


def waiting_for_join(budget: Budget, run: FragmentRun, mib: int) -> None:
    """The wide project of a fragment is done, and the map that its rows are joined with is not."""
    budget.take(run, "quick", "whole", mib * MIB)
    quick = run.nodes["quick"]
    quick.done, quick.table = True, object()
    run.nodes["joined"].waits_for.discard("quick")
    run.nodes["slow"].started = True


def test_rows_that_wait_for_a_join_make_room_for_the_next_fragment():
    budget, (known, first, second, third) = Budget(100 * MIB, 100), runs(4)
    finish(budget, known, 60)
    assert admitted(budget, [first, second]) == 1
    waiting_for_join(budget, first, 50)
    assert budget.admits(second)
    assert first.nodes["quick"].table is not None, "asking drops nothing"
    budget.charge(second)
    assert first.nodes["quick"].table is None, "it is read from its part again"
    assert (first.held, first.dropped, first.peak) == (0, 50 * MIB, 60 * MIB - 10 * MIB)
    assert not budget.admits(third), "10 and 60 MiB are taken"
    first.read("quick")
    assert first.dropped == 0


def test_rows_are_kept_where_dropping_them_would_not_make_enough_room():
    budget, (known, first, second) = Budget(100 * MIB, 100), runs(3)
    finish(budget, known, 60)
    budget.charge(first)
    waiting_for_join(budget, first, 15)
    assert not budget.admits(second)
    assert first.nodes["quick"].table is not None


def test_rows_that_a_stage_needs_now_are_kept():
    for change in ("joined starts", "slow is done"):
        budget, (known, first, second) = Budget(100 * MIB, 100), runs(3)
        finish(budget, known, 60)
        budget.charge(first)
        waiting_for_join(budget, first, 50)
        first.nodes["joined"].started = change == "joined starts"
        if change == "slow is done":
            first.nodes["joined"].waits_for.clear()
        assert not budget.admits(second), change
        assert first.nodes["quick"].table is not None


REPEATED = 288 << 10


def pages(batch: pa.Table) -> pa.Table:
    """Two rows for each."""
    ids = [id for id in batch["id"].to_pylist() for _ in range(2)]
    return pa.table({"id": ids, "page": [n % 2 for n in range(len(ids))]})


async def gated(batch: pa.Table, store: str, wanted: int, fault: str, pages: bool) -> pa.Table:
    """Answers once so many fragments have come through the quick branch.

    Tells how many had, and not through the join.
    """

    def count(stage: str) -> int:
        return len(list(Path(store, "docs", stage, "parts").rglob("*.parquet")))

    deadline = time.monotonic() + 60
    while count("quick") < wanted:
        assert time.monotonic() < deadline, f"{count('quick')} fragments, expected {wanted}"
        await asyncio.sleep(0.01)
    if fault and not (mark := Path(store, "fault")).exists():
        mark.touch()
        if fault == "worker dies":
            os._exit(1)
        parts = Path(store, "docs", "quick", "parts").rglob("*.parquet")
        first = min(parts, key=lambda part: part.stat().st_mtime_ns)
        os.truncate(first, first.stat().st_size // 2)
    under_way = count("quick") - count("joined")
    ids = batch["id"].to_pylist() * (2 if pages else 1)
    made = {"id": ids, "seen": [under_way] * len(ids)}
    return pa.table(made | ({"page": [n // len(batch) for n in range(len(ids))]} if pages else {}))


def branches(root: Path, wanted: int, kind: str, fault: str = "") -> vd.Pipeline:
    """Wide rows of a quick branch, which wait for a slow branch at a join."""
    for index in range(4):
        ids = range(index * 100, (index + 1) * 100)
        write_source(root / "src", {"id": ids}, f"{index}.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(root / "src")), id="id")
    quick: Any = docs
    if kind.startswith("quick children"):
        many = {"page": "BIGINT"}
        quick = docs.map_batches(
            "pages", pages, schema=many, cardinality="one_to_many", id="page_id"
        )
    length = REPEATED // 2 if kind.startswith("quick children") else REPEATED
    quick = quick.project("quick", {"text": f"repeat(chr(97 + (id % 26)::INT), {length})"})
    slow_children = kind == "slow children as list"
    slow = docs.map_batches(
        "slow",
        gated,
        schema={"seen": "BIGINT", **({"page": "BIGINT"} if slow_children else {})},
        fn_kwargs={
            "store": str(root / "store"), "wanted": wanted, "fault": fault, "pages": slow_children,
        },
        concurrency=1,
        **({"cardinality": "one_to_many", "id": "page_id"} if slow_children else {}),
    )  # fmt: skip
    children: dict[str, Any] = {}
    if kind != "plain":
        children = {"children": "rows" if kind.endswith("rows") else "list"}
    docs.join("joined", *((quick, slow) if not children or slow_children else (slow, quick)),
              **children)  # fmt: skip
    return docs


@pytest.fixture
def joined_from(monkeypatch: pytest.MonkeyPatch) -> list[set[type]]:
    """What each join was given: rows held, or those of a part."""
    found: list[set[type]] = []
    whole = Requests.whole

    def watched(self: Requests, run: Any, node: Any, worker: str) -> Any:
        work, tables = whole(self, run, node, worker)
        if node.spec.name == "joined":
            found.append({type(rows) for rows in work.inputs})
        return work, tables

    monkeypatch.setattr(Requests, "whole", watched)
    return found


def room_for(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many MiB for the fragments under way."""
    bytes_there = int(mib * MIB / executor._BUDGET_SHARE)

    def capacity(backend: LocalBackend) -> Capacity:
        return Capacity((backend._node,), bytes_there)

    monkeypatch.setattr(LocalBackend, "capacity", capacity)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("plain", "worker dies"),
        ("plain", "part is damaged"),
        ("slow children as list", ""),
        ("quick children as list", ""),
        ("quick children as rows", ""),
    ],
)
def test_more_fragments_are_under_way_where_rows_wait_for_a_join(
    kind, fault, tmp_path, local, materialize, monkeypatch, joined_from
):
    room_for(44, monkeypatch)  # of 28 MiB each, and 32 as long as none has come through
    assert materialize(branches(tmp_path, 3, kind, fault), local).success
    assert sum(PartRows in read for read in joined_from) >= 2
    assert len(joined_from) == 4 + (fault == "part is damaged"), "one is computed again"
    rows = read_stage(tmp_path / "store", "docs", "joined").to_pylist()
    texts = [(row["id"], text) for row in rows for text in texts_of(row)]
    made_of = 2 if kind.startswith("quick children") else 1
    assert [id for id, _ in texts] == [n for n in range(400) for _ in range(made_of)]
    assert all(text == chr(97 + id % 26) * (REPEATED // made_of) for id, text in texts)
    if kind == "slow children as list":
        assert all(len(row["slow"]) == 2 for row in rows)


def texts_of(row: dict[str, Any]) -> list[str]:
    return [row["text"]] if "text" in row else [child["text"] for child in row["quick"]]


def test_without_that_one_fragment_is_under_way(
    tmp_path, local, materialize, monkeypatch, joined_from
):
    """The control of the test above: what it asks for, the budget alone does not allow."""
    room_for(44, monkeypatch)
    monkeypatch.setattr(FragmentRun, "droppable", lambda run: [])
    assert materialize(branches(tmp_path, 1, "plain"), local).success
    assert joined_from == [{HeldRows}] * 4
    seen = read_stage(tmp_path / "store", "docs", "joined").column("seen").to_pylist()
    assert max(seen) == 1


# Fragments that outgrow what was expected


async def watched(batch: pa.Table, store: str) -> pa.Table:
    """Tells how many fragments came through the stage above while the first was here."""

    def count(stage: str) -> int:
        return len(list(Path(store, "docs", stage, "parts").rglob("*.parquet")))

    deadline = time.monotonic() + 60
    while count("wide") < 2:
        assert time.monotonic() < deadline, "the second fragment was not admitted"
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    return pa.table({"id": batch["id"], "seen": [count("wider")] * len(batch)})


def test_a_younger_fragment_waits_where_both_have_outgrown_the_memory(
    tmp_path, local, materialize, monkeypatch
):
    room_for(70, monkeypatch)  # two of 32 MiB, as is assumed at first; they become 40 and 80
    for index in range(2):
        ids = range(index * 100, (index + 1) * 100)
        write_source(tmp_path / "src", {"id": ids}, f"{index}.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    wide = docs.project("wide", {"text": f"repeat('x', {400 << 10})"})
    wider = wide.project("wider", {"text": "text", "again": "text"})
    wider.map_batches(
        "seen",
        watched,
        schema={"seen": "BIGINT"},
        columns=["id"],
        concurrency=1,
        fn_kwargs={"store": str(tmp_path / "store")},
    )
    assert materialize(docs, local).success
    seen = read_stage(tmp_path / "store", "docs", "seen").column("seen").to_pylist()
    assert seen == [1] * 100 + [2] * 100
