"""Two runs at once on one Ray cluster, one of which is killed."""

from __future__ import annotations

from support.damage import stored_parts
from support.data import write_source
from support.pool_models import noted, ray_compute, rows, until  # noqa: F401  # fixtures
from support.pools_process import Process

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
