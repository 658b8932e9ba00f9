"""Two runs at once on one Ray cluster: no fragment is computed twice, whatever becomes of one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.pools_process import Process
from vane_dagster.compute.client import PoolManagerClient, pool_managers
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.compute.pool_state import Sharer
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.events import Committed, Event, Failed, Waiting
from vane_dagster.orchestration.run import run_pipeline
from vane_dagster.worker.protocol import PoolSpec

ROWS = 200


class Model:
    """Notes the ids that it is given; fails once at the id 70 where it finds the file `fails`."""

    def __init__(self, log: str, sleep: float) -> None:
        self.log, self.sleep = Path(log), sleep

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        ids = batch["id"].to_pylist()
        with open(self.log / "calls", "a") as file:
            file.write("".join(f"{id}\n" for id in ids))
        time.sleep(self.sleep)
        if 70 in ids and (self.log / "fails").exists():
            os.unlink(self.log / "fails")
            raise ValueError("this happens once")
        return {"id": ids, "out": [2 * id for id in ids]}


def noted(folder: Path) -> list[int]:
    file = folder / "calls"
    return sorted(int(line) for line in file.read_text().splitlines()) if file.exists() else []


def until(true: Callable[[], Any], what: str, seconds: float = 40.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what}"
        time.sleep(0.02)
    return found


class Driver:
    """A run of its own thread, with its own claims and leases."""

    def __init__(self, tmp_path: Path, compute: Any, name: str, sleep: float = 0.1) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        pipeline = docs(tmp_path, sleep)
        store = vd.FragmentStore(root=str(tmp_path / "store")).open()

        def body() -> None:
            try:
                run_pipeline(
                    pipeline, tuple(pipeline.stages), [None], compute, store, name,
                    listen=self.events.append, log=lambda _: None, check=lambda: None,
                    check_runner=CheckRunner(pipeline, store),
                )  # fmt: skip
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def done(self) -> None:
        self.thread.join(100)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def docs(tmp_path: Path, sleep: float) -> vd.Pipeline:
    pipeline = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=10
    )
    clean = pipeline.project("clean", ["id"])
    out = clean.map_batches(
        "out", Model, schema={"id": "BIGINT", "out": "BIGINT"}, batch_size=10, concurrency=2,
        fn_constructor_kwargs={"log": str(tmp_path), "sleep": sleep},
    )  # fmt: skip
    out.write("sink", str(tmp_path / "sink"))
    return pipeline


@pytest.fixture
def ray_compute(cluster: vd.LocalCluster, tmp_path: Path) -> Iterator[vd.RayCompute]:
    """The session's cluster, without models' pools afterwards; a source of 20 fragments."""
    write_source(tmp_path / "src", {"id": range(ROWS)})
    cluster.connect()
    yield vd.RayCompute(cluster=cluster)
    import ray

    cluster.connect()
    for pool_manager in pool_managers().values():
        for pool in ray.get(pool_manager.pools.remote()):
            if pool["identity"] != "io":
                ray.get(pool_manager.evict.remote(pool["identity"], True))


def manifests(tmp_path: Path, stage: str) -> list[str]:
    folder = tmp_path / "store" / "docs" / stage / "manifests"
    return [path.name for path in folder.rglob("*.json")]


def outs(tmp_path: Path, partition: str | None = None) -> list[int]:
    rows = read_stage(tmp_path / "store", "docs", "out", partition).sort_by("id")
    return rows["out"].to_pylist()


def test_two_runs_of_a_partition_compute_it_once(tmp_path, ray_compute):
    drivers = [Driver(tmp_path, ray_compute, "first"), Driver(tmp_path, ray_compute, "second")]
    for driver in drivers:
        driver.done()

    assert noted(tmp_path) == list(range(ROWS)), "each row was computed once"
    assert outs(tmp_path) == [2 * n for n in range(ROWS)]
    for stage in ("clean", "out", "sink"):
        (name,) = manifests(tmp_path, stage)
        for driver in drivers:
            (committed,) = [e for e in driver.events_of(Committed) if e.stage == stage]
            assert str(committed.name) == name
        stats = [e.stats for d in drivers for e in d.events_of(Committed) if e.stage == stage]
        assert sum(found.computed for found in stats) == 20
    assert not any(driver.events_of(Failed) for driver in drivers)


def test_a_run_waits_for_what_another_computes_and_says_so(tmp_path, ray_compute):
    first = Driver(tmp_path, ray_compute, "first-run-of-two", sleep=0.6)
    until(lambda: len(noted(tmp_path)) >= 60, "fragments are under way")
    second = Driver(tmp_path, ray_compute, "second-run-of-two", sleep=0.6)
    first.done()
    second.done()
    assert noted(tmp_path) == list(range(ROWS))
    waits = [e for d in (first, second) for e in d.events_of(Waiting) if e.reason == "fragments"]
    assert any(e.text.startswith("waiting for") for e in waits), waits
    assert waits[-1].over


def test_a_run_takes_over_where_another_failed(tmp_path, ray_compute):
    (tmp_path / "fails").touch()
    drivers = [Driver(tmp_path, ray_compute, "first"), Driver(tmp_path, ray_compute, "second")]
    for driver in drivers:
        driver.done()
    failed = [driver for driver in drivers if driver.events_of(Failed)]
    (good,) = [driver for driver in drivers if not driver.events_of(Failed)]
    assert len(failed) == 1
    assert {event.stage for event in good.events_of(Committed)} == {"clean", "out", "sink"}
    assert outs(tmp_path) == [2 * n for n in range(ROWS)]
    again = [n for n in noted(tmp_path) if noted(tmp_path).count(n) > 1]
    assert 70 in again
    assert len(manifests(tmp_path, "out")) == 1


def test_a_run_takes_over_from_one_that_was_killed(tmp_path, ray_compute):
    write_source(tmp_path / "src" / "a", {"id": range(ROWS)})
    given = {"fn_constructor_kwargs": {"sleep": 0.3}}
    options = {"pipeline": {"fragment_rows": 10}}
    killed = Process(tmp_path, {"out": dict(given)}, "a", **options)
    until(lambda: len(noted(tmp_path)) > 20, "the first run is under way")
    other = Process(tmp_path, {"out": dict(given)}, "a", **options)
    folder = tmp_path / "store" / "docs" / "out" / "parts"
    until(lambda: len(list(folder.rglob("*.parquet"))) > 4, "some parts are written")
    killed.kill()
    other.done()
    assert outs(tmp_path, "a") == [2 * n for n in range(ROWS)]
    calls = noted(tmp_path)
    assert set(calls) == set(range(ROWS))
    # What the killed run had at its worker, in slices of batches of five.
    assert len(calls) - ROWS <= 40
    assert len(manifests(tmp_path, "out")) == 1


# Shared workers and priorities


def test_leases_know_who_shares_their_workers(ray_compute):
    backend = RayBackend(lease_seconds=2.0)
    pool = PoolSpec("shared", "Shared", (1, 1))
    first = backend.lease("first", [pool])
    second = backend.lease("second", [pool], priority=3)
    (worker,) = first.workers()
    assert second.sharers() == {worker.name: (Sharer("first", 0),)}
    until(first.sharers, "a heartbeat was answered")
    assert first.sharers() == {worker.name: (Sharer("second", 3),)}
    second.release()
    until(lambda: not first.sharers(), "the next one was answered")
    first.release()


def test_the_run_with_the_higher_priority_gets_the_lease_first(ray_compute):
    backend = RayBackend()

    def pool(name: str) -> PoolSpec:
        return PoolSpec(name, name.title(), (1, 1), {"accelerator": 1})

    holder = backend.lease("holder", [pool("held")])
    granted: list[str] = []

    def lease(name: str, priority: int) -> threading.Thread:
        def body() -> None:
            found = backend.lease(name, [pool(name)], priority=priority)
            granted.append(name)
            found.release()

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    low = lease("low", 0)
    time.sleep(0.3)
    high = lease("high", 5)
    time.sleep(0.3)
    holder.release()
    for thread in (low, high):
        thread.join(30)
    assert granted == ["high", "low"]


def test_the_priority_tag_of_a_run_reaches_its_lease(tmp_path, local, monkeypatch):
    write_source(tmp_path / "src", {"id": range(10)})
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.project("clean", ["id"])
    priorities: list[int] = []
    lease = LocalBackend.lease

    def noted_lease(self, run_id, pools, cancelled=None, priority=0, waits=None):
        priorities.append(priority)
        return lease(self, run_id, pools, cancelled, priority, waits)

    monkeypatch.setattr(LocalBackend, "lease", noted_lease)
    for tag in ("7", "-2", "high"):
        dg.materialize(
            [pipeline.build_assets()],
            resources={"compute": local, "store": vd.FragmentStore(root=str(tmp_path / tag))},
            tags={"dagster/priority": tag},
        )
    assert priorities == [7, -2, 0]


# The pool manager; last, because a restarted one evicts nothing for the time of a lease


def test_a_pool_manager_that_dies_costs_no_row(tmp_path, ray_compute):
    import ray

    drivers = [Driver(tmp_path, ray_compute, "first"), Driver(tmp_path, ray_compute, "second")]
    until(lambda: len(noted(tmp_path)) >= 30, "both runs are under way")
    ray.kill(PoolManagerClient().actor, no_restart=False)
    for driver in drivers:
        driver.done()
    assert set(noted(tmp_path)) == set(range(ROWS))
    assert outs(tmp_path) == [2 * n for n in range(ROWS)]
    assert len(manifests(tmp_path, "out")) == 1
