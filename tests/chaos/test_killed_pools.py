"""Warm pools whose pool manager, driver, actors or constructors are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from support.pool_models import (  # noqa: F401  # fixtures
    SCHEMA,
    add,
    alive,
    all_loaded,
    compute_clean,
    docs,
    listed,
    meanwhile,
    noted,
    partitions,
    ray_compute,
    rows,
    until,
)
from support.pools_process import CLUSTER, Process
from support.pools_run import ShortLease
from support.results import failure
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


def test_a_killed_actor_is_replaced(tmp_path, compute_clean, materialize):
    pipeline = docs(tmp_path, rows=100)
    add(pipeline, "out", tmp_path, sleep=0.1)

    def kill_actor() -> None:
        until(lambda: len(noted(tmp_path / "calls")) > 10, "the run is under way")
        os.kill(noted(tmp_path / "loads")[0], signal.SIGKILL)

    with meanwhile(kill_actor):
        materialize(pipeline, compute_clean)

    assert len(noted(tmp_path / "loads")) == 2
    assert rows(tmp_path, "out")["out"].to_pylist() == [2 * n for n in range(100)]


def test_actors_that_died_while_idle_are_no_failed_starts(tmp_path, ray_compute, materialize):
    for run in (1, 2):
        pipeline = docs(tmp_path)
        add(pipeline, "out", tmp_path, concurrency=4)
        materialize(pipeline, ray_compute, config={"force": True})
        # It is called before the loop goes on.
        pids = until(lambda: all_loaded(tmp_path, 4 * run), "all actors are ready")  # noqa: B023 (called at once)
        for pid in pids[-4:]:
            os.kill(pid, signal.SIGKILL)


def test_the_lease_of_a_killed_driver_expires(tmp_path, ray_compute):
    partitions(tmp_path, "a", 400)
    stage = {"fn_constructor_kwargs": {"sleep": 0.3}}
    killed = Process(tmp_path, {"out": dict(stage)}, "a", short_lease=True)
    until(lambda: len(noted(tmp_path / "calls")) > 5, "the run is under way")
    assert listed()[0]["leases"]
    killed.kill()

    until(lambda: not listed()[0]["leases"], "the lease expires", 10)
    time.sleep(1.0)
    calls = len(noted(tmp_path / "calls"))
    time.sleep(1.0)
    assert len(noted(tmp_path / "calls")) == calls, "queued calls are not done"
    assert calls < 200

    partitions(tmp_path, "b", 20)
    (found,) = Process(tmp_path, {"out": dict(stage)}, "b").done()
    assert found["warm_hits"] == 1
    assert len(noted(tmp_path / "loads")) == 1
    assert rows(tmp_path, "out", "b")["out"].to_pylist() == [2 * n for n in range(20)]


class Dies:
    """Takes its process with it."""

    def __init__(self) -> None:
        os._exit(7)

    def __call__(self, batch):
        return batch


def test_a_constructor_that_kills_its_process_fails_the_stage(tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    pipeline.map_batches("out", Dies, schema=SCHEMA, concurrency=1)
    message = failure(materialize(pipeline, local, raises=False))
    assert "died while its model was constructed" in message
    assert "exit code 7" in message


def test_subprocesses_end_with_a_killed_driver(tmp_path):
    partitions(tmp_path, "a", 400)
    killed = Process(tmp_path, {"out": {"fn_constructor_kwargs": {"sleep": 0.3}}}, "a", local=True)
    until(lambda: noted(tmp_path / "calls"), "the run is under way")
    (pid,) = noted(tmp_path / "loads")
    (tables,) = {Path(a) for a in psutil.Process(int(pid)).cmdline() if Path(a).name[:5] == "vane-"}
    assert tables.is_dir()
    killed.kill()
    until(lambda: not alive(pid), "the worker ends", 5)
    until(lambda: not tables.exists(), "its tables go", 5)
