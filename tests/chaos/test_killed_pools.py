"""Warm pools whose pool manager or driver is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil

from support.damage import stored_parts
from support.data import write_source
from support.pool_models import (  # noqa: F401  # fixtures  # noqa: F401  # fixtures
    SCHEMA,
    add,
    docs,
    listed,
    meanwhile,
    noted,
    ray_compute,
    rows,
    until,
)
from support.pools_process import CLUSTER, Process
from support.pools_run import ShortLease
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.processes import marked


def test_a_run_continues_while_the_pool_manager_is_killed(
    tmp_path, cluster, ray_compute, materialize
):
    pipeline = docs(tmp_path, rows=200)
    add(pipeline, "out", tmp_path, sleep=0.4, concurrency=2)
    seen: dict[str, Any] = {}

    def kill_pool_manager() -> None:
        until(lambda: len(noted(tmp_path / "calls")) > 20, "the run is under way")
        mark = str(LocalHead(**CLUSTER).temp_dir)
        commands = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in marked(mark)}
        (pool_manager,) = [pid for pid, command in commands.items() if "PoolManager" in command]
        seen["before"] = listed()
        os.kill(pool_manager, signal.SIGKILL)
        seen["after"] = until(lambda: [p for p in listed() if p["leases"]], "leases are learnt", 20)
        seen["calls"] = len(noted(tmp_path / "calls"))

    with meanwhile(kill_pool_manager):
        materialize(pipeline, ShortLease(cluster=cluster))

    assert seen["calls"] < 200, "the pool manager came back during the run"
    (before,), (after,) = seen["before"], seen["after"]
    assert after["leases"] == before["leases"]
    assert {w["pid"] for w in after["workers"]} == {w["pid"] for w in before["workers"]}
    assert rows(tmp_path, "out")["out"].to_pylist() == [2 * n for n in range(200)]
    (pool,) = listed()
    assert pool["leases"] == []
    assert len(noted(tmp_path / "loads")) == 2


# Two runs at once, one of which is killed

ROWS = 200


def test_a_run_takes_over_from_one_that_was_killed(tmp_path, ray_compute):
    write_source(tmp_path / "src" / "a", {"id": range(ROWS)})
    given = {"fn_constructor_kwargs": {"sleep": 0.3}}
    options = {"pipeline": {"fragment_rows": 10}, "short_lease": True}
    killed = Process(tmp_path, {"out": dict(given)}, "a", **options)
    until(lambda: len(noted(tmp_path / "calls")) > 20, "the first run is under way")
    other = Process(tmp_path, {"out": dict(given)}, "a", **options)
    folder = tmp_path / "store" / "docs" / "out"
    until(lambda: len(stored_parts(folder / "parts")) > 4, "some parts are written")
    killed.kill()
    other.done()
    assert rows(tmp_path, "out", "a")["out"].to_pylist() == [2 * n for n in range(ROWS)]
    calls = noted(tmp_path / "calls")
    assert set(calls) == set(range(ROWS))
    # What the killed run had at its worker, in slices of batches of five.
    assert len(calls) - ROWS <= 40
    assert len([*(folder / "manifests").rglob("*.json")]) == 1
