"""Backfills that are cancelled or killed, in a real ``dagster dev``."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import psutil
import pytest

from support.backfills import SLOW, TURNS, dev, slowly  # noqa: F401  # fixtures
from support.dagster_dev import IN_PROCESS

pytest.importorskip("dagster_webserver", reason="dagster-webserver is not installed")

# Batches: two workers, with a fragment at work and one queued each, of two batches.
IN_FLIGHT = 8


def test_cancelled_run_stops_and_leaves_parts_and_warm_workers(dev, slowly):
    values = list(range(1000, 1400))
    dev.write("slow", "stopped", values)
    run = dev.launch(SLOW, "stopped")
    dev.wait(lambda: dev.parts("slow/noted", "stopped") >= 4, "four parts are written")

    dev.terminate(run)

    assert dev.ended(run, seconds=30) == "CANCELED"
    called = dev.calls(values)
    assert len(called) < 80
    pools = dev.pools()
    assert not any(run in pool["leases"] for pool in pools)
    (pool,) = [pool for pool in pools if pool["label"] == "Noting"]
    warm = {worker["pid"] for worker in pool["workers"]}
    assert warm
    assert all(map(psutil.pid_exists, warm))
    time.sleep(1.5)  # what was at work or queued would have begun by now
    assert dev.calls(values) == called, "the workers went on"

    kept = dev.parts("slow/noted", "stopped")
    dev.slowly(False)
    dev.succeeded(dev.launch(SLOW, "stopped", IN_PROCESS))

    metadata = dev.asset("slow/noted", ["stopped"])["stopped"]["metadata"]
    assert metadata["fragments_reused"] == kept
    assert metadata["fragments_computed"] == 40 - kept
    assert metadata["model_loads"] == 0
    assert metadata["warm_hits"] > 0
    rows = dev.rows("slow/noted", "stopped")
    assert rows["id"] == list(range(400))
    assert set(rows["pid"]) <= warm
    assert dev.calls(values).total() <= 80 + IN_FLIGHT


def test_killed_run_worker_loses_what_was_in_flight_and_no_more(dev, slowly):
    which, values = "worker-killed", list(range(5000, 5400))
    dev.write("slow", which, values)
    run = dev.launch(SLOW, which)
    dev.wait(lambda: dev.parts("slow/noted", which) >= 4, "four parts are written")
    step = psutil.Process(dev.pid(run, "STEP_WORKER_STARTED"))

    os.kill(dev.pid(run, "ENGINE_EVENT"), signal.SIGKILL)

    # The step of a killed run worker is a process of its own, which nobody listens to any more.
    assert dev.ended(run) == "FAILURE"
    dev.wait(lambda: _is_gone(step), "the step has ended", 30)
    kept = dev.parts("slow/noted", which)
    assert kept < 40

    dev.slowly(False)
    dev.succeeded(dev.launch(SLOW, which, IN_PROCESS))

    metadata = dev.asset("slow/noted", [which])[which]["metadata"]
    assert metadata["fragments_reused"] >= kept
    assert metadata["fragments_reused"] + metadata["fragments_computed"] == 40
    assert metadata["model_loads"] == 0
    assert dev.rows("slow/noted", which)["id"] == list(range(400))
    assert dev.calls(values).total() <= 80 + IN_FLIGHT


def test_backfill_outlives_the_daemon_and_computes_nothing_twice(dev, slowly):
    """The first of two runs is at work and the second queued when the daemon is killed."""
    dev.limit_pool("one_at_a_time", 1)
    first, second = list(range(7000, 7200)), list(range(8000, 8200))
    dev.write("turns", "c", first)
    dev.write("turns", "d", second)
    backfill = dev.backfill(TURNS, ["c", "d"], IN_PROCESS)
    dev.wait(lambda: dev.calls(first + second).total() >= 4, "a run is at work")

    dev.kill_daemon()
    dev.slowly(False)
    dev.start()
    state = dev.backfill_ended(backfill)

    assert state["status"] == "COMPLETED_SUCCESS"
    assert [run["status"] for run in state["runs"]] == ["SUCCESS", "SUCCESS"]
    assert dev.calls(first + second) == Counter([*first[::5], *second[::5]])
    for stage in TURNS:
        found = dev.asset(stage, ["c", "d"])
        assert [what["events"] for what in found.values()] == [1, 1]
        assert [what["stale"] for what in found.values()] == ["FRESH"] * 2
        for key in "cd":
            assert dev.rows(stage, key)["id"] == list(range(200))


def _is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
