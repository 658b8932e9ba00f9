"""Work built from tasks: its operation, its inputs, and what happens to its result."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

import vane_dagster as vd
from support.arguments import grouped
from support.data import same
from vane_dagster.compute.api import Worker
from vane_dagster.engine.fragment_state import FragmentState, Held, make_task_states
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.engine.tasks import Task, WorkBuilder
from vane_dagster.engine.worker_group import WorkerQueue
from vane_dagster.planning.plan import Part
from vane_dagster.providers.template import PrefixOrder, parse_template
from vane_dagster.retries import WORKER_DIED, RetriedRows
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord, PartInfo
from vane_dagster.storage.store import Store
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import (
    CallUdf,
    PartRows,
    Reject,
    SampledRows,
    TableRows,
)

URL = "file:///nowhere/a.parquet"
SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64())])
FIRST, SECOND = Worker("m-1", "m"), Worker("m-2", "m")


class Fragment:
    """A fragment of 100 rows in a pipeline of a project and a map, and its builders."""

    def __init__(self, *stages: str, sample: Any = None, **options: Any) -> None:
        docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
        clean = docs.project("clean", ["x"])
        clean.map_batches("model", same, schema={"x": "BIGINT"}, batch_size=10, **grouped(options))
        names = stages or ("clean", "model")
        record = FragmentRecord(URL, 0, 100, "f", 10)
        states = make_task_states([docs[name].spec for name in names])
        self.run = FragmentState(0, 0, 0, record, states)
        planned = {
            name: SimpleNamespace(keys=(f"{name}0",), leaving=(), row_definition="", generation=0)
            for name in names
        }
        partition = SimpleNamespace(
            preview=0,
            key="p", schemas=dict.fromkeys(["source", "clean", "model"], SCHEMA), stages=planned,
            listed={URL: FileRecord(URL, 1, "v")}, sample=sample or {},
        )  # fmt: skip
        plan: Any = SimpleNamespace(
            definitions={},
            pipeline=docs,
            partitions=[partition],
            source=docs.source,
            files={},
            kept={},
            id_rule=lambda of: None,
        )
        self.parts: dict[tuple[int, str], dict[int, Part]] = {}
        self.allowed = 7
        state: Any = SimpleNamespace(
            plan=plan, store=Store(Location("/nowhere/store")), parts=self.parts, run_id="run",
            faults_allowed=lambda index, stage: self.allowed, floors={},
            pending=SimpleNamespace(batches={}),
        )  # fmt: skip
        sizer = SliceSizer({"model": PoolSpec("m", "Model", (2, 2))})
        sizer.learn("model", 2.0, 100)  # slices of 30 rows
        self.work = WorkBuilder(state, "lease", sizer, lambda stage: 2)
        self.queue = WorkerQueue(2)
        self.queue.mark_ready(FIRST)
        self.queue.mark_ready(SECOND)

    def state(self, stage: str) -> Any:
        return self.run.task_states[stage]

    def take(self, kind: Any, retry: RetriedRows | None = None, worker: Worker = FIRST) -> Any:
        task = Task(self.run, 0, "model", kind, retry)
        if not len(self.queue):
            self.queue.push(0, task)
        return self.work.take_next(task, self.queue, worker, last=False)

    def whole(self, stage: str) -> Any:
        return self.work.whole(Task(self.run, 0, stage, "whole"))


def test_upstream_rows_are_read_from_memory_as_long_as_they_are_there():
    fragment = Fragment()
    fragment.state("clean").table = Held("table", 100)
    work, tables = fragment.whole("model")
    assert (work.inputs, tables) == ((TableRows(0),), ["table"])
    assert not work.keep, "nothing reads it"

    fragment.state("clean").table = None
    fragment.parts[0, "clean"] = {0: Part(Location("/parts"), PartInfo("k", "d", 100, 10))}
    work, tables = fragment.whole("model")
    (rows,) = work.inputs
    assert isinstance(rows, PartRows)
    assert (rows.folder, rows.name, tables) == (Location("/parts"), "k-d.parquet", [])


def test_a_sample_limits_the_rows_that_are_read_not_those_in_memory():
    fragment = Fragment(sample={0: (3, 5)})
    work, _ = fragment.whole("clean")
    (rows,) = work.inputs
    assert isinstance(rows, SampledRows)
    assert rows.places == (3, 5)
    fragment.state("clean").table = Held("table", 100)
    work, _ = fragment.whole("model")
    assert work.inputs == (TableRows(0),)


def test_the_rows_that_may_still_fail_are_looked_up_for_each_call():
    fragment = Fragment(on_error="quarantine", max_error_rate=0.5)
    task = Task(fragment.run, 0, "model", "slice")
    first = fragment.work.op(task)
    fragment.allowed = 2
    second = fragment.work.op(task)
    assert isinstance(first, CallUdf)
    assert isinstance(second, CallUdf)
    assert (first.max_faults, second.max_faults) == (7, 2)


def test_slices_of_arranged_rows_have_the_columns_of_the_upstream_stage_alone():
    fragment = Fragment()
    state = fragment.state("model")
    state.spec = replace(state.spec, row_order=PrefixOrder(parse_template("here", "{x}", None)))
    state.give(Held("input", 100))
    work, _, start, rows = fragment.take("slice")
    assert work.inputs == (TableRows(0, start, start + rows, ("id", "x")),)
    work, _, _, _ = fragment.take("slice", RetriedRows(20, 1, WORKER_DIED, 2, "segmentation fault"))
    assert work.inputs == (TableRows(0, 20, 21, ("id", "x")),)


def test_a_row_that_is_given_up_is_rejected_with_the_reason():
    fragment = Fragment()
    fragment.state("model").give(Held("input", 100))
    work, _, _, _ = fragment.take("slice", RetriedRows(20, 1, WORKER_DIED, 2, "segmentation fault"))
    assert isinstance(work.op, Reject)
    assert (work.op.error, work.op.attempts) == (WORKER_DIED, 2)
    assert work.op.message == (
        "ended 2 workers, each while processing only this row; the last one: segmentation fault"
    )
