"""Automatic retries of runs by Dagster, and what failed runs leave in its event log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute
from support.results import failure, materializing
from vane_dagster.orchestration import run as runs

ROWS = 8


def noted(n: int) -> int:
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{n}\n")
    if n == ROWS - 1 and os.environ.get("IS_DOWN"):
        raise ConnectionError("down")
    return n


@pytest.fixture
def docs(tmp_path: Path) -> vd.Pipeline:
    write_source(tmp_path / "src", {"id": range(ROWS), "n": range(ROWS)})
    pipeline = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=2)
    stage = pipeline.project("clean", ["n"]).map(
        "noted", noted, schema="BIGINT", on_error=vd.Failures(max_retries=0)
    )
    stage.project("doubled", {"d": "2 * noted"})
    return pipeline


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


AUTOMATIC = {"dagster/retry_number": "1"}
FROM_FAILURE = {"dagster/is_resume_retry": "true"}


def test_a_retry_of_a_forced_run_resumes_it(docs, instance, tmp_path, monkeypatch):
    """An automatic one, or a re-execution from failure."""
    notes, run = tmp_path / "notes", materializing(tmp_path)
    monkeypatch.setenv("NOTES", str(notes))

    def forced(**given):
        notes.write_text("")
        given |= {"config": {"force": True}, "raises": False, "instance": instance}
        result = run(docs, InProcessCompute(), **given)
        return result, sorted(map(int, notes.read_text().split()))

    assert run(docs, InProcessCompute()).success
    monkeypatch.setenv("IS_DOWN", "1")
    first, called = forced()
    assert (first.success, called) == (False, [*range(ROWS)])
    monkeypatch.delenv("IS_DOWN")

    def retried(result, kind=AUTOMATIC):
        root = {"dagster/root_run_id": first.dagster_run.run_id}
        parent = {"dagster/parent_run_id": result.dagster_run.run_id}
        return forced(tags={**kind, **parent, **root})

    second, called = retried(first)
    assert called == [ROWS - 2, ROWS - 1], "the fragment that failed"
    third, called = retried(second, FROM_FAILURE)
    assert called == [], "it is done"
    assert retried(third)[1] == [], "the attempt that it repeats is the first of all"
    again, called = forced(tags={"dagster/root_run_id": first.dagster_run.run_id})
    assert called == [*range(ROWS)], "another run"
    for kind in (AUTOMATIC, FROM_FAILURE):
        assert retried(again, kind)[1] == [], "the attempt that it repeats is not the first"


def test_a_cancelled_run_leaves_no_planned_checks(docs, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))

    def cancelled(self: InProcessCompute, *args: object) -> None:
        raise KeyboardInterrupt

    with dg.instance_for_test() as instance:
        monkeypatch.setattr(InProcessCompute, "backend", cancelled)
        with pytest.raises(KeyboardInterrupt):
            materializing(tmp_path)(docs, InProcessCompute(), instance=instance)
        key = dg.AssetCheckKey(docs["noted"].key, "rows")
        storage = instance.event_log_storage
        assert storage.get_asset_check_execution_history(key, limit=5) == []


def test_the_step_of_a_run_that_is_over_stops(docs, tmp_path, monkeypatch):
    """The step of a run worker that was killed is a process of its own, and lives on."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setattr(runs, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(dg.DagsterRun, "is_finished", True)
    result = materializing(tmp_path)(docs, InProcessCompute(), raises=False)
    assert "is over, STARTED, so its step stops. Finished parts are kept" in failure(result)
