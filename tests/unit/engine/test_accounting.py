"""A part's counts against what it was made from, and how many rows a stage may quarantine."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.counted_runs import Clock, counts, fragment
from support.data import same, write_source
from support.in_process import committed, compute
from support.plans import plan
from support.prompts import Reversed, docs
from vane_dagster.compute.api import Worker
from vane_dagster.engine.accounting import PoolClock, count_error
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.fragment_state import FragmentState, make_task_states
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.worker_group import WorkerQueue
from vane_dagster.errors import FailedRowsError
from vane_dagster.events import Committed, PoolTime, Progress
from vane_dagster.retries import Backoff
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FragmentRecord, PartInfo
from vane_dagster.storage.store import Store
from vane_dagster.worker.reports import Tally, WorkReport


@pytest.fixture
def pipeline() -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    docs.project("all", ["n"])
    docs.project("some", ["n"], where="n > 1")
    docs.map_batches("many", same, schema={"x": "BIGINT"}, cardinality=vd.Children("part_id"))
    return docs


def state(pipeline: vd.Pipeline) -> Any:
    return SimpleNamespace(
        pipeline=pipeline,
        parts=defaultdict(dict),
        plan=SimpleNamespace(partitions=[SimpleNamespace(sample=None)]),
    )


def in_progress(pipeline: vd.Pipeline) -> FragmentState:
    specs = [stage.spec for stage in pipeline]
    record = FragmentRecord("file:///a", 0, 10, "f", 10)
    return FragmentState(0, 0, record, make_task_states(pipeline, specs))


def part(rows: int, **counted: int) -> PartInfo:
    return PartInfo("k", "d", rows, 1, **{"rows_in": 10, **counted})


@pytest.mark.parametrize(
    ("stage", "written", "is_right"),
    [
        ("all", part(10), True),
        ("all", part(9), False),
        ("all", part(9, quarantined=1), True),
        ("all", part(9, filtered=1), False),
        ("all", part(9, rows_in=9), False),
        ("some", part(4, filtered=6), True),
        ("some", part(4, filtered=5), False),
        ("many", part(25), True),
        ("many", part(9), False),
        ("many", part(9, quarantined=1), True),
    ],
)
def test_every_row_is_accounted_for(pipeline, stage, written, is_right):
    spec = pipeline[stage].spec
    error = count_error(state(pipeline), in_progress(pipeline), spec, written, "the part")
    assert (error is None) == is_right
    if error:
        assert "expected each row of 'source' to be filtered, quarantined or" in str(error)


def test_the_time_of_workers_ends_with_their_last_call():
    queue, pool, worker = WorkerQueue(2), PoolClock(PoolTime(("a",))), Worker("w", "p")
    queue.loading.add(worker)
    pool.advance(0.0, queue, False)
    queue.mark_ready(worker)
    pool.advance(3.0, queue, False)  # it has loaded, and waits for input
    queue.begin(worker, 10)
    pool.advance(1.0, queue, False)
    queue.end(worker, 10)
    pool.advance(5.0, queue, True)  # it has computed, and waits for room
    pool.advance(7.0, queue, False)
    found = pool.time
    assert (found.workers, found.loading, found.input, found.computing) == (1, 3.0, 1.0, 5.0)
    assert found.room == 0.0, "nobody knows yet whether it has another call"
    queue.begin(worker, 10)
    pool.advance(2.0, queue, False)
    pool.advance(1.0, queue, False)
    assert (pool.time.room, pool.time.input, pool.time.computing) == (7.0, 3.0, 6.0)
    assert pool.time.shares["computing"] == pytest.approx(6 / 19)


def test_progress_counts_rows_that_are_copied():
    events: list[Progress] = []
    clock = Clock()
    progress, stats = counts(clock, events)
    begun: Any = fragment(0)
    progress.add(begun, "a", "slice", WorkReport(Tally(3)))
    clock.now = 1.0
    progress.emit_progress()
    progress.add_part(begun, begun.task_states["a"], part(3, rows_in=50, copied=47))
    clock.now = 2.0
    progress.emit_progress()
    assert [(each.done["a"], each.total["a"]) for each in events] == [(3, 200), (50, 100)]
    assert stats[0, "a"].rows_in == 3


def test_rows_that_the_source_could_not_read_were_not_computed(tmp_path, store):
    (tmp_path / "a.csv").write_text("id,n\n1,1\n2,x\n3,3\n")
    source = vd.csv(str(tmp_path / "a.csv"), types={"id": "BIGINT", "n": "BIGINT"})
    docs = vd.Pipeline("docs", source=source, id="id")
    docs.project("all", ["n"])
    lenient = vd.Failures("quarantine", max_error_rate=1.0)
    docs.map("sliced", as_it_is, output_column="m", on_error=lenient)
    docs.map("keyless", as_it_is, output_column="m", on_error=lenient, reuse="fragments")
    events = compute(docs, store)
    for stage in docs.stages:
        (event,) = committed(events, stage)
        (part,) = event.manifest.parts
        assert (part.rows_in, part.quarantined, part.unread) == (3, 1, 1), stage
        assert event.manifest.figures["rows_computed"] == event.stats.rows_in == 2, stage


class RateLimit(Exception):
    status_code = 429


class Limited(Reversed):
    """A provider that refuses each text once."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.seen = set[str]()

    async def submit(self, request: Any) -> Any:
        text = request.messages[-1]["content"]
        if text not in self.seen:
            self.seen.add(text)
            raise RateLimit
        return await super().submit(request)


def test_requests_after_a_rate_limit_are_counted(tmp_path, store, monkeypatch):
    monkeypatch.setattr("vane_dagster.retries.CALLS", Backoff(0.0, 0.0))
    pipeline = docs(tmp_path)
    pipeline.prompt("asked", "{text}", provider=Limited, model="m")
    events = compute(pipeline, store)
    (stats,) = (each.stats for each in events if isinstance(each, Committed))
    assert (stats.retries, stats.rate_limited) == (4, 4)


# The limit of a run


def as_it_is(n: int) -> int:
    return n


@pytest.mark.parametrize(
    ("rate", "checks", "allowed"),
    [
        (None, [], 10),
        (None, [vd.checks.ErrorRate(0.5)], 50),
        (None, [vd.checks.ErrorRate(0.5, blocking=False)], sys.maxsize),
        (None, [vd.checks.Off("rows")], sys.maxsize),
        (0.2, [], 20),
        (0.2, [vd.checks.ErrorRate(0.01, blocking=False, name="strict")], 20),
        (0.2, [vd.checks.ErrorRate(0.5, name="lenient")], 20),
    ],
)
def test_the_blocking_checks_of_the_error_rate_limit_a_run(tmp_path, store, rate, checks, allowed):
    pq.write_table(pa.table({"id": range(100), "n": range(100)}), tmp_path / "0.parquet")
    docs = vd.Pipeline("docs", source=vd.parquet(tmp_path / "0.parquet"), id="id")
    failures, asset = vd.Failures("quarantine", max_error_rate=rate), vd.Asset(checks=checks)
    docs.map("m", as_it_is, on_error=failures, asset=asset)

    state = RunState(plan(docs, store), store, "run", [].append, CheckRunner(docs, store))

    assert state.faults_allowed(0, "m") == allowed


@pytest.mark.parametrize("check", [vd.checks.ErrorRate(0.01), vd.checks.Off("rows")])
def test_the_limit_is_declared_in_one_place(check):
    docs = vd.Pipeline("docs", source=vd.table([{"id": 1, "n": 1}]), id="id")
    failures, asset = vd.Failures("quarantine", max_error_rate=0.2), vd.Asset(checks=[check])
    with pytest.raises(vd.errors.DefinitionError, match="sets the limit of the check"):
        docs.map("m", as_it_is, on_error=failures, asset=asset)


@pytest.mark.parametrize("fragment_rows", [100, 40])
def test_equal_rows_that_fail_count_each(tmp_path, fragment_rows):
    """The function is called with one of them."""

    def refuse(text: str) -> int:
        raise ValueError("an empty page")

    table = pa.table({"id": range(100), "text": [""] * 100})
    write_source(tmp_path / "src", table)
    source = vd.parquet(f"{tmp_path}/src")
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=fragment_rows)
    docs.map("words", refuse, schema={"words": "BIGINT"}, on_error="quarantine")
    store = Store(StoragePath(str(tmp_path / "store")))
    for _ in range(2):  # the second run computes them again
        with pytest.raises(FailedRowsError, match=r"100 of 100 rows failed|more rows failed than"):
            compute(docs, store)
    assert not store.latest("docs", "words", [None]), "it is not committed"
