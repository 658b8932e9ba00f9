"""Claims on partitions: the table by a fake clock, and the queue of two runs that share one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.claims import TableClaims
from support.data import write_source
from vane_dagster.compute.waits import Waits
from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, ClaimTable
from vane_dagster.engine.accounting import WaveProgress
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.fragment_queue import FragmentQueue
from vane_dagster.engine.fragment_state import FragmentState
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import UdfError
from vane_dagster.events import Event, Failed, Noticed
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.store import Store

# The table

GRANTED, CHANGED = ClaimAnswer(), ClaimAnswer(is_changed=True)


def ask(
    table: ClaimTable, run: str, *wanted: str, now: float = 0.0, release: str = "", age: float = 0.0
) -> list[ClaimAnswer]:
    """Each letter is a name. Claims expire after ten seconds."""
    return table.ask(ClaimRequest(run, run, 10.0, wanted, release, age), now)


def test_names_are_claimed_together_or_not_at_all_until_their_holder_releases_them_or_ends():
    table = ClaimTable()
    for _ in range(2):
        assert ask(table, "one", "ab", "c") == [GRANTED, GRANTED], "also if it is repeated"
    assert ask(table, "two", "bd", "e", release="b") == [ClaimAnswer("one"), GRANTED]
    assert ask(table, "one", "d", "e") == [GRANTED, ClaimAnswer("two")], "d was not claimed with b"
    for _ in range(2):
        table.end("one", 1.0)
    assert ask(table, "two", "ab", "c", "d", now=2.0) == [CHANGED] * 3


def test_a_released_name_is_free_and_tells_others_to_look_into_the_store():
    table = ClaimTable()
    ask(table, "one", "ab")
    ask(table, "one", release="a", now=100.0)
    assert ask(table, "two", "a", "b", now=101.0, age=50.0) == [CHANGED, ClaimAnswer("one")]
    assert ask(table, "one", "c", now=102.0, age=50.0) == [GRANTED], "of another name"
    ask(table, "two", release="a", now=200.0)
    assert ask(table, "one", "ac", now=1000.0, age=10.0) == [GRANTED], "listed since"
    assert ask(table, "one", "ac", now=1000.0, age=800.0) == [CHANGED]


def test_claims_expire_with_a_holder_that_is_not_heard_of():
    table = ClaimTable()
    ask(table, "one", "a")
    ask(table, "one", now=8.0)
    table.expire(17.0)
    assert ask(table, "two", "a", now=17.0) == [ClaimAnswer("one")]
    table.expire(19.0)
    assert ask(table, "two", "a", now=20.0, age=20.0) == [CHANGED], "it may have written parts"


# The queues of two runs


class Run:
    """A run without workers: the test writes its parts."""

    def __init__(self, planned: RunPlan, store: Store, table: ClaimTable, run_id: str) -> None:
        assert not planned.failed, planned.failed
        self.events: list[Event] = []
        emit = self.events.append
        check_runner = CheckRunner(planned.pipeline, store)
        self.claims = TableClaims(table, run_id)
        self.state = RunState(planned, store, run_id, emit, check_runner, self.claims)
        self.state.begin()
        stages = planned.selected
        counts = WaveProgress(self.state, stages)
        self.queue = FragmentQueue(self.state, stages, counts, Waits(emit))
        self.computed: list[tuple[int, int, str]] = []

    def take(self) -> FragmentState | None:
        """The next fragment once the claims are answered, None if there is none at present."""
        for _ in range(2):
            self.queue.claim_ahead(in_progress=0)
            while self.queue.is_claiming and not (self.queue._asking and self.queue._asking.done()):
                time.sleep(0.001)
            self.queue.apply_claims()
            if fragment := self.queue.peek():
                self.queue.pop()
                return fragment
        return None

    def write(self, fragment: FragmentState, *stages: str) -> None:
        """Writes the parts of a fragment, as workers would."""
        for stage in stages or tuple(fragment.task_states):
            partition = self.state.plan.partitions[fragment.partition]
            table = partition.schemas[stage].empty_table()
            pipeline = self.state.pipeline.name
            folder = self.state.store.parts(pipeline, stage, partition.key)
            key = partition.stages[stage].keys[fragment.index]
            info = write_part(table, PartTarget(folder, key, "id"))
            self.state.add_part(fragment.partition, stage, fragment.index, Part(folder, info))
            fragment.task_states[stage].done = True
            self.computed.append((*fragment.place, stage))
        if fragment.finished:
            self.queue.end(fragment.partition)

    def drain(self) -> None:
        deadline = time.monotonic() + 20
        while not self.queue.is_empty:
            assert time.monotonic() < deadline, "the run does not end"
            if fragment := self.take():
                self.write(fragment)

    def end(self) -> None:
        self.queue.close()
        self.state.close()
        self.claims.close()

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two runs of eight partitions of two fragments in two stages, planned at the same time."""
    monkeypatch.setattr("vane_dagster.engine.fragment_queue._ASK_SECONDS", 0.0)
    monkeypatch.setattr("vane_dagster.engine.fragment_queue._REPORT_AFTER_SECONDS", 0.0)
    keys = [f"p{number}" for number in range(8)]
    for key in keys:
        for number in range(2):
            write_source(tmp_path / "src" / key, {"id": [number]}, f"{number}.parquet")
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path / "src" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
        fragment_rows=1,
    )
    pipeline.project("one", ["id"]).project("two", {"id": "id", "next": "id + 1"})
    store = Store(StoragePath(str(tmp_path / "store")))
    table = ClaimTable()
    runs = [
        Run(plan_run(pipeline, ["one", "two"], order, store), store, table, name)
        for name, order in (("first---run", keys), ("second--run", keys[::-1]))
    ]
    yield runs
    for run in runs:
        run.end()


EVERYTHING = sorted(itertools.product(range(8), range(2), ("one", "two")))


def computed(first: Run, second: Run) -> list[tuple[int, int, str]]:
    """What the runs have computed, with the partitions of the first one."""
    return sorted([*first.computed, *((7 - p, i, stage) for p, i, stage in second.computed)])


def test_a_run_waits_for_the_partitions_of_another_and_says_so(two):
    first, second = two
    begun = first.take()
    while fragment := second.take():
        second.write(fragment)
    second.queue.report_waits(idle=True)
    (waiting,) = second.events_of(Noticed)
    assert waiting.text == "waiting for 2 partitions of run first---", "it claims some ahead"
    assert not waiting.is_problem
    assert len(second.computed) == 6 * 4

    first.write(begun)
    first.drain()
    second.drain()
    second.queue.report_waits(idle=True)
    (_, ended) = second.events_of(Noticed)
    assert ended.text.startswith("no longer waiting for other runs (")
    assert computed(first, second) == EVERYTHING


def test_a_run_continues_a_partition_that_another_has_given_up(two):
    first, second = two
    fragment = first.take()
    first.write(fragment)
    first.state.fail(0, "two", UdfError("a row is wrong"))
    first.drain()
    first.claims.close()
    second.drain()
    assert computed(first, second) == EVERYTHING
    assert (0, 1, "two") not in first.computed
    (failed,) = first.events_of(Failed)
    assert failed.stage == "two"
    assert failed.partition == "p0"
