"""Two runs at once on one Ray cluster, one of which is killed."""

from __future__ import annotations

from support.concurrent_runs import (  # noqa: F401  # fixtures
    ROWS,
    manifests,
    noted,
    outs,
    ray_compute,
    warm,
)
from support.damage import stored_parts
from support.data import write_source
from support.pool_models import until
from support.pools_process import Process


def test_a_run_takes_over_from_one_that_was_killed(tmp_path, ray_compute):
    write_source(tmp_path / "src" / "a", {"id": range(ROWS)})
    given = {"fn_constructor_kwargs": {"sleep": 0.3}}
    options = {"pipeline": {"fragment_rows": 10}, "short_lease": True}
    killed = Process(tmp_path, {"out": dict(given)}, "a", **options)
    until(lambda: len(noted(tmp_path)) > 20, "the first run is under way")
    other = Process(tmp_path, {"out": dict(given)}, "a", **options)
    folder = tmp_path / "store" / "docs" / "out" / "parts"
    until(lambda: len(stored_parts(folder)) > 4, "some parts are written")
    killed.kill()
    other.done()
    assert outs(tmp_path, "a") == [2 * n for n in range(ROWS)]
    calls = noted(tmp_path)
    assert set(calls) == set(range(ROWS))
    # What the killed run had at its worker, in slices of batches of five.
    assert len(calls) - ROWS <= 40
    assert len(manifests(tmp_path, "out")) == 1
