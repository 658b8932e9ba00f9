"""Claims on fragments: the table by a fake clock, and the queue of two runs that share one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster.compute.waits import Waits
from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, ClaimTable, Group
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


def ask(
    table: ClaimTable,
    run: str,
    *groups: str,
    now: float = 0.0,
    release: str = "",
    age: float = 0.0,
    ttl_seconds: float = 30.0,
) -> ClaimAnswer:
    """Each letter of a group is a key; all are of one scope."""
    wanted = [Group("scope", tuple(letter.encode() for letter in group)) for group in groups]
    keys = [letter.encode() for letter in release]
    return table.ask(ClaimRequest(run, run, ttl_seconds, wanted, keys, {"scope": age}), now)


def test_a_group_is_claimed_whole_or_not_at_all_until_its_holder_releases_it_or_ends():
    table = ClaimTable()
    for _ in range(2):
        assert ask(table, "one", "ab", "c").held_by == ["", ""], "also if it is repeated"
    assert ask(table, "two", "bd", "e", release="b").held_by == ["one", ""], "of another run"
    assert ask(table, "one", "d", "e").held_by == ["", "two"], "d was not claimed with b"
    for _ in range(2):
        table.end("one", 1.0)
    assert ask(table, "two", "ab", "c", "d", now=2.0).held_by == [""] * 3


def test_a_released_key_is_free_and_tells_others_to_look_into_the_store():
    table = ClaimTable()
    ask(table, "one", "ab")
    ask(table, "one", release="a", now=100.0)
    freed = ask(table, "two", "a", "b", now=101.0, age=50.0)
    assert freed.held_by == ["", "one"]
    assert freed.changed == {"scope"}
    assert ask(table, "one", "c", now=102.0, age=50.0).changed == set(), "its own release"
    assert ask(table, "two", "c", now=1000.0, age=10.0).changed == set(), "listed since"
    assert ask(table, "two", "c", now=1000.0, age=950.0).changed == {"scope"}


def test_claims_expire_with_a_holder_that_is_not_heard_of():
    table = ClaimTable()
    ask(table, "one", "a", ttl_seconds=10.0)
    ask(table, "one", now=8.0, ttl_seconds=10.0)
    table.expire(17.0)
    assert ask(table, "two", "a", now=17.0).held_by == ["one"]
    table.expire(19.0)
    taken = ask(table, "two", "a", now=20.0, age=20.0)
    assert taken.held_by == [""]
    assert taken.changed == {"scope"}, "the lost run may have written parts"


# The queues of two runs


class TableClaims:
    def __init__(self, table: ClaimTable, run_id: str) -> None:
        self.table, self.run_id = table, run_id

    def ask(
        self,
        groups: Sequence[Group],
        release: Sequence[bytes] = (),
        ages: Mapping[str, float] | None = None,
    ) -> ClaimAnswer:
        request = ClaimRequest(self.run_id, self.run_id, 30.0, groups, release, ages or {})
        return self.table.ask(request, time.monotonic())

    def close(self) -> None:
        self.table.end(self.run_id, time.monotonic())


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
        self.computed: list[tuple[int, str]] = []

    def take(self) -> FragmentState | None:
        """The next fragment once the claims are answered, None if there is none at present."""
        for _ in range(2):
            self.queue.claim_ahead(in_progress=0)
            while self.queue.is_claiming and not (self.queue._asking and self.queue._asking.done()):
                time.sleep(0.001)
            self.queue.apply_claims()
            self.queue.drop_given_up()
            if self.queue.peek():
                return self.queue.pop()
        return None

    def write(self, run: FragmentState, *stages: str) -> None:
        """Writes the parts of a fragment, as workers would."""
        for stage in stages or tuple(run.task_states):
            partition = self.state.plan.partitions[run.partition]
            table = partition.schemas[stage].empty_table()
            pipeline = self.state.pipeline.name
            folder = self.state.store.parts(pipeline, stage, partition.key)
            key = partition.stages[stage].keys[run.index]
            info = write_part(table, PartTarget(folder, key, "id"))
            self.state.add_part(run.partition, stage, run.index, Part(folder, info))
            run.task_states[stage].done = True
            self.computed.append((run.index, stage))
        if run.finished:
            self.queue.end(run)

    def drain(self) -> None:
        deadline = time.monotonic() + 20
        while not self.queue.is_empty:
            assert time.monotonic() < deadline, "the run does not end"
            if run := self.take():
                self.write(run)

    def end(self) -> None:
        self.queue.close()
        self.state.close()
        self.claims.close()

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two runs of one partition of eight fragments in two stages, planned at the same time."""
    monkeypatch.setattr("vane_dagster.engine.fragment_queue._RETRY_IDLE_SECONDS", 0.0)
    monkeypatch.setattr("vane_dagster.engine.fragment_queue._RELEASE_SECONDS", 0.0)
    monkeypatch.setattr("vane_dagster.engine.fragment_queue._REPORT_AFTER_SECONDS", 0.0)
    for number in range(8):
        write_source(tmp_path / "src", {"id": [number]}, f"{number}.parquet")
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    pipeline.project("one", ["id"]).project("two", {"id": "id", "next": "id + 1"})
    store = Store(StoragePath(str(tmp_path / "store")))
    table = ClaimTable()
    runs = [
        Run(plan_run(pipeline, ["one", "two"], [None], store), store, table, name)
        for name in ("first---run", "second--run")
    ]
    yield runs
    for run in runs:
        run.end()


def everything() -> list[tuple[int, str]]:
    return sorted((index, stage) for index in range(8) for stage in ("one", "two"))


def test_a_run_waits_for_the_other_and_says_so(two):
    first, second = two
    held = [first.take()]
    while first.queue.peek():
        held.append(first.queue.pop())
    mine = 0
    while (fragment := second.take()) is not None:
        second.write(fragment)
        mine += 1
    assert mine + len(held) == 8
    assert not second.queue.is_empty
    second.queue.report_waits(idle=True)
    (waiting,) = second.events_of(Noticed)
    assert waiting.text == f"waiting for {len(held)} fragments of run first---"
    assert not waiting.is_problem

    for fragment in held:
        first.write(fragment)
    first.drain()
    second.drain()
    second.queue.report_waits(idle=True)
    (_, ended) = second.events_of(Noticed)
    assert ended.text.startswith("no longer waiting for other runs (")
    assert sorted(first.computed + second.computed) == everything()


def test_a_run_takes_over_what_another_has_failed_to_compute(two):
    first, second = two
    fragment = first.take()
    first.state.fail(0, "one", UdfError("a row is wrong"))
    fragment.abandon({"one", "two"})
    first.queue.end(fragment)
    first.drain()
    assert first.computed == [], "the rest of its fragments is given up too"
    first.claims.close()
    second.drain()
    assert sorted(second.computed) == everything()
    assert len(first.events_of(Failed)) == 2


# Reports of waits
