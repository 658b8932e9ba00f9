"""Runs whose fragments have to share memory: how many are under way at once."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.damage import stored_parts
from support.data import read_stage, write_source
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.engine import executor, memory_budget
from vane_dagster.engine.fragment_state import FragmentState
from vane_dagster.engine.tasks import WorkBuilder
from vane_dagster.worker.protocol import PartRows, TableRows

MIB = 1 << 20
REPEATED = 36 << 10


def pages(batch: pa.Table) -> pa.Table:
    """Two rows for each."""
    ids = [id for id in batch["id"].to_pylist() for _ in range(2)]
    return pa.table({"id": ids, "page": [n % 2 for n in range(len(ids))]})


async def gated(batch: pa.Table, store: str, wanted: int, fault: str, pages: bool) -> pa.Table:
    """Answers once so many fragments have come through the quick branch.

    Tells how many had, and not through the join.
    """

    def count(stage: str) -> int:
        return len(stored_parts(Path(store, "docs", stage)))

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
        quick = docs.map_batches("pages", pages, schema=many, cardinality=vd.Children("page_id"))
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
        cardinality=vd.Children("page_id") if slow_children else "one_to_one",
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
    whole = WorkBuilder.whole

    def watched(
        self: WorkBuilder, run: Any, task_state: Any, worker: str, is_costly: bool = True
    ) -> Any:
        work, tables = whole(self, run, task_state, worker, is_costly)
        if task_state.spec.name == "joined":
            found.append({type(rows) for rows in work.inputs})
        return work, tables

    monkeypatch.setattr(WorkBuilder, "whole", watched)
    return found


def room_for(mib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many MiB for the fragments under way, of which one is expected to take 4 at first."""
    bytes_there = int(mib * MIB / executor._BUDGET_SHARE)
    monkeypatch.setattr(
        memory_budget, "_MIN_SOURCE_BYTES", 4 * MIB / memory_budget._UNKNOWN_EXPANSION
    )

    def capacity(backend: LocalBackend) -> Capacity:
        return Capacity((backend._node,), bytes_there)

    monkeypatch.setattr(LocalBackend, "capacity", capacity)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("plain", "worker dies"),
        ("slow children as list", ""),
        ("quick children as list", ""),
        ("quick children as rows", ""),
    ],
)
def test_more_fragments_are_under_way_where_rows_wait_for_a_join(
    kind, fault, tmp_path, local, materialize, monkeypatch, joined_from
):
    room_for(5.5, monkeypatch)  # of 3.5 MiB each
    assert materialize(branches(tmp_path, 3, kind, fault), local).success
    assert sum(PartRows in read for read in joined_from) >= 2
    assert len(joined_from) == 4
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
    room_for(5.5, monkeypatch)
    monkeypatch.setattr(FragmentState, "droppable", lambda run: [])
    assert materialize(branches(tmp_path, 1, "plain"), local).success
    assert joined_from == [{TableRows}] * 4
    counts = read_stage(tmp_path / "store", "docs", "joined").column("seen").to_pylist()
    assert max(counts) == 1


# Fragments that outgrow what was expected


async def watched(batch: pa.Table, store: str) -> pa.Table:
    """Tells how many fragments came through the stage above while the first was here."""

    def count(stage: str) -> int:
        return len(stored_parts(Path(store, "docs", stage)))

    deadline = time.monotonic() + 60
    while count("wide") < 2:
        assert time.monotonic() < deadline, "the second fragment was not admitted"
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    return pa.table({"id": batch["id"], "seen": [count("wider")] * len(batch)})


def test_a_younger_fragment_waits_where_both_have_outgrown_the_memory(
    tmp_path, local, materialize, monkeypatch
):
    room_for(8.75, monkeypatch)  # two of 4 MiB, as is assumed at first; they become 5 and 10
    for index in range(2):
        ids = range(index * 100, (index + 1) * 100)
        write_source(tmp_path / "src", {"id": ids}, f"{index}.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    wide = docs.project("wide", {"text": f"repeat('x', {50 << 10})"})
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
    counts = read_stage(tmp_path / "store", "docs", "seen").column("seen").to_pylist()
    assert counts == [1] * 100 + [2] * 100
