"""Two runs at once on one Ray cluster: no fragment is computed twice, whatever becomes of one."""

from __future__ import annotations

import dagster as dg

import vane_dagster as vd
from support.concurrent_runs import (  # noqa: F401  # fixtures
    ROWS,
    Driver,
    manifests,
    noted,
    outs,
    ray_compute,
    warm,
)
from support.data import write_source
from support.pool_models import until
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.events import Committed, Failed, Waiting


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
