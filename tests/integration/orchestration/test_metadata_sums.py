"""The metadata of all partitions of a run, added up, against what the run did."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.counted_runs import (
    FILES,
    KEYS,
    ROWS,
    source,  # noqa: F401  # fixtures
)
from support.damage import stored_parts
from support.paths import REPOSITORY
from support.results import entries, materializing
from support.warm_workers import ForkedLocal
from vane_dagster import testing
from vane_dagster.events import WorkerReady
from vane_dagster.orchestration.reporting import RunReport

PARTITIONS = dg.StaticPartitionsDefinition(KEYS)


def note(what: str) -> None:
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{what}\n")


class Model:
    def __init__(self) -> None:
        time.sleep(0.2)
        note("load")

    def __call__(self, batch: pa.Table) -> dict[str, pa.ChunkedArray]:
        time.sleep(0.01)
        note("call")
        return {"y": batch["x"]}


def pipeline(folder: Path, **options) -> vd.Pipeline:
    """Two stages that share a pool, in one wave; partitions of three fragments each."""
    source = vd.parquet(f"{folder}/src/{{partition_key}}/*.parquet")
    made = vd.Pipeline("sums", source=source, id="id", partitions_def=PARTITIONS)
    clean = made.project("clean", ["x"])
    given = {"schema": {"y": "BIGINT"}, "batch_size": 3, "env_vars": ["NOTES"], **options}
    clean.map_batches("one", Model, **grouped(given))
    clean.map_batches("two", Model, **grouped(given))
    return made


class Ran:
    """A run over all partitions: its events, its metadata by stage and partition, and notes."""

    def __init__(self, folder: Path, made: vd.Pipeline, compute, instance, monkeypatch, **given):
        events: list = []
        listen = RunReport.listen
        notes = folder / "notes"
        notes.write_text("")
        with monkeypatch.context() as patched:
            patched.setattr(
                RunReport, "listen", lambda self, e: (events.append(e), listen(self, e))
            )
            began = time.perf_counter()
            given = {**given, "raises": False, "instance": instance}
            self.result = materializing(folder)(made, compute, KEYS, **given)
            self.seconds = time.perf_counter() - began
        self.events = events
        self.notes = Counter(notes.read_text().split())
        self.found = {
            (m.asset_key.path[-1], m.partition): entries(m.metadata)
            for m in (e.materialization for e in self.result.get_asset_materialization_events())
        }

    def sum(self, name: str, *stages: str) -> float:
        """The sum of an entry over the partitions that the run computed, of some stages or all."""
        return sum(
            each.get(name, 0)
            for (stage, _), each in self.found.items()
            if (stage in stages or not stages) and "computed_by_run" not in each
        )

    def ready(self) -> list:
        return [event.report for event in self.events if isinstance(event, WorkerReady)]


def documented(done: Ran) -> set[str]:
    """The names of a run's metadata, which are all in the page about it."""
    found = {name for each in done.found.values() for name in each}
    page = (REPOSITORY / "docs" / "metadata.md").read_text()
    names = {name: {f"`{name}`", f"`{name.replace('_', ' ')}`"} for name in sorted(found)}
    assert [name for name, either in names.items() if not any(e in page for e in either)] == []
    return found


@pytest.fixture
def run(source, local, monkeypatch):
    with dg.DagsterInstance.ephemeral() as instance:
        yield lambda made=None, compute=local, **given: Ran(
            source, made or pipeline(source), compute, instance, monkeypatch, **given
        )


def test_loads_and_work_add_up_to_those_of_the_runs(run, source):
    # The first run loads models, and computes all.
    compute = ForkedLocal(num_cpus=2, resources={"accelerator": 1})  # models stay warm
    done = run(compute=compute)

    assert done.result.success
    reports = done.ready()
    assert done.notes["load"] == len(reports) >= 1
    assert done.sum("model_loads") == done.notes["load"]
    assert done.sum("warm_hits") == 0
    seconds = sum(report.seconds for report in reports)
    assert done.sum("model_load_seconds") == pytest.approx(seconds, abs=0.01)

    fragments = FILES * len(KEYS)
    assert done.sum("batches") == done.notes["call"] == 2 * fragments * 3
    for stage in ("clean", "one", "two"):
        assert done.sum("fragments_computed", stage) == fragments
        assert done.sum("fragments_reused", stage) == 0
        assert done.sum("dagster/partition_row_count", stage) == fragments * ROWS
        parts = stored_parts(source / "store/sums" / stage)
        assert done.sum("bytes", stage) == sum(part.stat().st_size for part in parts)
        assert 0 < done.sum("seconds", stage) <= done.seconds
        rows = {k: e["rows_per_second"] * e["seconds"] for k, e in done.found.items()}
        assert sum(rows.values()) == pytest.approx(3 * fragments * ROWS, rel=0.05)
    for stage in ("one", "two"):
        in_code = done.sum("seconds_in_user_code", stage)
        assert 0.01 * fragments * 3 <= in_code <= done.sum("worker_seconds", stage)

    # A forced one finds them warm.
    again = run(compute=compute, config={"force": True})
    warm = [report.warm for report in again.ready()]
    assert again.sum("warm_hits") == warm.count(True) >= 1
    assert again.sum("model_loads") == again.notes["load"] == warm.count(False)
    assert again.sum("model_load_seconds") == pytest.approx(
        sum(report.seconds for report in again.ready() if not report.warm), abs=0.01
    )

    # Of what is up to date, this run did nothing, and the details have the former computation.
    reused = run(compute=compute)
    of_run = ("fragments_computed", "fragments_reused", "dagster/column_schema")
    of_run += ("dagster/column_lineage",)  # in one materialization of each run
    nothing = ("rows_computed", "seconds", "model_loads", "warm_hits")
    for place, before in again.found.items():
        found = reused.found[place]
        assert found.pop("computed_by_run") == again.result.run_id[:8]
        assert (found["fragments_computed"], found["fragments_reused"]) == (0, FILES)
        assert before["rows_computed"] == FILES * ROWS
        assert {found.get(name, 0) for name in nothing} == {0}
        assert f"| {before['seconds']:,} |" in found["details"]
        others = {*before} - {*of_run, *nothing, "details"}
        assert {name: found[name] for name in others} == {name: before[name] for name in others}

    # Retries, quarantined rows and a killed worker count once.
    made = pipeline(source, on_error="quarantine", max_error_rate=1.0, batch_size="auto")
    bad = [1, 2, 1105, 2203]
    with testing.faults(
        testing.CallFault("one", ids=bad, error="ValueError"),
        testing.CallFault("two", "disconnect", ids=[1001, 2002], times=2),
        testing.CallFault("two", "kill", ids=[2203], times=1),
    ) as injected:
        done = run(made, config={"force": True})
    assert done.result.success
    assert done.sum("fragments_computed") == 3 * FILES * len(KEYS), "one of them started over"
    assert done.sum("model_loads") == len(done.ready()) == done.notes["load"] >= 2
    assert done.sum("rows_quarantined") == done.sum("rows_quarantined", "one") == len(bad)
    assert done.sum("retries") == done.sum("retries", "two") == injected.fired[1]
    assert {"retries", "rows_quarantined", "model_loads", "batches"} <= documented(done)
