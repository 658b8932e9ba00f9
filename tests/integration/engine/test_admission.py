"""Runs whose fragments have to share memory: how many are under way at once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.damage import stored_parts
from support.data import read_stage, write_source
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.engine import executor, memory_budget

MIB = 1 << 20


def room_for(mib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many MiB for the fragments under way, of which one is expected to take 4 at first."""
    bytes_there = int(mib * MIB / executor._BUDGET_SHARE)
    monkeypatch.setattr(
        memory_budget, "_MIN_SOURCE_BYTES", 4 * MIB / memory_budget._UNKNOWN_EXPANSION
    )

    def capacity(backend: LocalBackend) -> Capacity:
        return Capacity((backend._node,), bytes_there)

    monkeypatch.setattr(LocalBackend, "capacity", capacity)


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
