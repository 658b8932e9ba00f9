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
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.events import Committed, Failed


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
