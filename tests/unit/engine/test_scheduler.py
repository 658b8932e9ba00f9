"""The wave scheduler with fake workers and a fake clock: what runs where, and what is retried."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Union

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.claims import TableClaims
from support.data import same
from vane_dagster.compute.api import IO_WORKERS, CallResult, Cancelled, Worker
from vane_dagster.compute.work_claims import ClaimTable
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.scheduler import WaveScheduler
from vane_dagster.errors import ClusterLostError, ComputeError
from vane_dagster.events import Failed, Noticed
from vane_dagster.planning.plan import Part, PartitionPlan, RunPlan, StagePlan
from vane_dagster.retries import TIMED_OUT, WORKER_DIED, Cause
from vane_dagster.sources import FragmentRule
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileRecord, FragmentRecord, PartInfo
from vane_dagster.storage.store import Store
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import CallUdf, Reject, TableRows, Work
from vane_dagster.worker.reports import Fault, LoadReport, Tally, WorkReport

ROWS = 64
SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64())])
MIB = 1 << 20


QUARANTINE = {"on_error": "quarantine", "max_error_rate": 1.0}


def mapped(**options: Any) -> vd.Pipeline:
    """A pipeline of one map, with slices of whole rows."""
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    options = {"batch_size": 8, **options}
    docs.map_batches("model", same, schema={"x": "BIGINT"}, **grouped(options))
    return docs


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class SameThread:
    """Executes what is submitted at once, in place of the thread that claims partitions."""

    def __init__(self, **options: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*given))
        return future

    def shutdown(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _claims_on_the_same_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vane_dagster.engine.fragment_queue.ThreadPoolExecutor", SameThread)


@dataclass(frozen=True)
class Lost:
    """The outcome of a call that was lost, if known some seconds after it began in the worker."""

    cause: Cause = "unclear"
    after: float = 0.1
    seconds: float | None = None

    @property
    def worker(self) -> bool:
        return self.cause != "table"


@dataclass(frozen=True)
class Call:
    ticket: int
    worker: Worker
    work: Work
    sent_at: float

    @property
    def kind(self) -> str:
        if isinstance(self.work.op, Reject):
            return "reject"
        if isinstance(self.work.op, CallUdf):
            return "whole" if self.work.target else "slice"
        calls = any(isinstance(rows, TableRows) for rows in self.work.inputs)
        return ("gather" if calls else "whole") if self.work.target else "load"

    @property
    def stage(self) -> str:
        return self.work.stage.rpartition("/")[2]

    @property
    def fragment(self) -> str:
        return self.work.fragment

    @property
    def rows(self) -> range:
        (rows,) = self.work.inputs
        assert isinstance(rows, TableRows)
        assert rows.stop is not None
        return range(rows.start, rows.stop)


Outcome = Union[WorkReport, Lost, None]


def done(call: Call) -> WorkReport:
    """The report of a call that succeeds, at a hundredth of a second a row."""
    if call.kind == "load":
        return WorkReport(Tally(rows_in=ROWS), rows_out=ROWS, bytes_out=ROWS, seconds=0.1)
    if call.kind in ("slice", "reject"):
        rows = len(call.rows)
        rejected = rows if call.kind == "reject" else 0
        tally = Tally(rows_in=rows, quarantined=rejected)
        return WorkReport(tally, rows_out=rows - rejected, bytes_out=rows, seconds=rows / 100)
    tally = call.work.tally or Tally(rows_in=ROWS)
    rows = tally.rows_in - tally.quarantined
    assert call.work.target is not None
    info = PartInfo(
        call.work.target.key, "d", rows, 10, rows_in=tally.rows_in, quarantined=tally.quarantined
    )
    return WorkReport(tally, rows_out=rows, bytes_out=rows, seconds=rows / 100, part=info)


class Lease:
    """Workers that answer in order, each one call at a time, as the test decides."""

    id = "lease"

    def __init__(
        self, clock: Clock, workers: Sequence[Worker], outcome: Callable[[Call], Outcome]
    ) -> None:
        self._clock, self._workers, self._outcome = clock, workers, outcome
        self._tickets = itertools.count()
        self._starts: list[int] = []
        self._lost: list[Call] = []
        self._queued: dict[Worker, list[Call]] = {}
        self._free_at: dict[Worker, float] = {}
        self._waits = 0
        self.calls: list[Call] = []
        self.answered: list[Call] = []
        self.replaced: list[Worker] = []
        self.pools: set[str] = set()
        """The leased pools."""
        self.together: set[int] = set()
        """The calls that were at a worker together with others, by ticket."""
        self.most = Counter[str]()
        """The most calls that a worker of each pool had at one time."""

    def workers(self) -> Sequence[Worker]:
        return [worker for worker in self._workers if worker.pool in self.pools]

    def load(self, worker: Worker, endpoints: Any = None) -> int:
        self._starts.append(next(self._tickets))
        return self._starts[-1]

    def status(self, worker: Worker) -> int:
        return next(self._tickets)  # no call waits for its answer

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        assert worker not in self.replaced
        call = Call(next(self._tickets), worker, work, self._clock.now)
        self.calls.append(call)
        queued = self._queued.setdefault(worker, [])
        self.together |= {call.ticket, *(other.ticket for other in queued)} if queued else set()
        queued.append(call)
        self.most[worker.pool] = max(self.most[worker.pool], len(queued))
        return call.ticket

    def moves(self) -> list[tuple[Worker, Worker]]:
        return []

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        self.replaced.append(worker)
        self._lost += self._queued.pop(worker, [])
        return Worker(f"{worker.name}'", worker.pool)

    def wait(self, timeout: float) -> list[CallResult]:
        self._waits += 1
        assert self._waits < 5_000, "the wave does not end"
        if self._starts:
            starts, self._starts = self._starts, []
            report = LoadReport(False, 1.0, 1, "cpu", "node")
            return [CallResult(ticket, report) for ticket in starts]
        if self._lost:
            lost, self._lost = self._lost, []
            return _lost(lost)
        ends = [self._end(queued[0]) for queued in self._queued.values() if queued]
        ends = [end for end in ends if end[0] <= self._clock.now + timeout]
        if not ends:
            self._clock.now += timeout
            return []
        at, _, call, outcome = min(ends)
        self._clock.now = max(at, self._clock.now)
        queued = self._queued[call.worker]
        self._free_at[call.worker] = self._clock.now
        queued.remove(call)
        if isinstance(outcome, WorkReport):
            self.answered.append(call)
            return [CallResult(call.ticket, outcome, table=f"table {call.ticket}")]
        lost = [call, *(self._queued.pop(call.worker) if outcome.worker else [])]
        return _lost(lost, outcome.cause, outcome.seconds)

    def _end(self, call: Call) -> tuple[float, int, Call, WorkReport | Lost]:
        began = max(call.sent_at, self._free_at.get(call.worker, 0.0))
        outcome = self._outcome(call) or done(call)
        seconds = outcome.after if isinstance(outcome, Lost) else outcome.seconds
        return began + seconds, call.ticket, call, outcome

    def sent(self, *kinds: str) -> list[Call]:
        return [call for call in self.calls if call.kind in kinds]


def _lost(
    calls: Sequence[Call], cause: Cause = "unclear", seconds: float | None = None
) -> list[CallResult]:
    lost = CallResult(0, None, lost="lost", cause=cause, seconds=seconds)
    return [replace(lost, ticket=call.ticket) for call in calls]


class Wave:
    """A wave over fragments of 64 rows."""

    def __init__(
        self,
        pipeline: vd.Pipeline,
        outcome: Callable[[Call], Outcome] = lambda call: None,
        partitions: Sequence[int] = (1,),
        workers: int = 2,
        has_gpu: bool = True,
        mib: int = 1,
        budget: int = 1 << 40,
        claims: Any = None,
        found: Any = None,
    ) -> None:
        self.clock, self.events = Clock(), list[Any]()
        self.cancelled = threading.Event()
        names = tuple(pipeline.stages)
        store = Store(StoragePath("/nowhere/store"))
        plan = RunPlan(
            pipeline, names, [_partition(names, p, n, mib) for p, n in enumerate(partitions)],
            {}, dict.fromkeys(names, ()), FragmentRule(ROWS), pipeline.source,
            listed_at=self.clock.now,
        )  # fmt: skip
        checks: Any = SimpleNamespace(results=None, before=None)
        self.state = RunState(plan, store, "run", self.events.append, checks, claims)
        self.state.__dict__["_commit_complete"] = lambda index: None
        pool = PoolSpec("m", "Model", (workers, workers), {"GPU": 1} if has_gpu else {})
        self.pools = {stage.name: pool for stage in pipeline if stage.spec.runs_udf}
        own = [Worker(f"m-{i}", "m") for i in range(workers)] if self.pools else []
        io = [Worker(f"io-{i}", IO_WORKERS) for i in range(2)]
        self.lease = Lease(self.clock, [*own, *io], outcome)
        self.state.__dict__["look_up"] = lambda index, stages: found or {}
        self._budget = budget

    def run(self, *stages: str) -> Wave:
        state = self.state
        stages = stages or state.plan.selected
        self.lease.pools = {
            IO_WORKERS,
            *(self.pools[s].identity for s in stages if s in self.pools),
        }
        pools = {stage: pool for stage, pool in self.pools.items() if stage in stages}
        WaveScheduler(
            state, stages, self.lease, pools, self._budget, self.cancelled,
            clock=self.clock,
        ).run()  # fmt: skip
        return self

    @property
    def notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Noticed)]

    @property
    def failures(self) -> dict[tuple[str, str | None], str]:
        found = [event for event in self.events if isinstance(event, Failed)]
        return {(event.stage, event.partition): str(event.error) for event in found}

    def part(self, stage: str = "model", partition: int = 0) -> PartInfo:
        return self.state.parts[partition, stage][0].info


def _partition(stages: Sequence[str], number: int, fragments: int, mib: int) -> PartitionPlan:
    plans = {
        stage: StagePlan(
            "digest", ("0",), None, tuple(f"{stage}{number}{i}" for i in range(fragments))
        )
        for stage in stages
    }
    url = f"file:///nowhere/{number}.parquet"
    files = (FileRecord(url, 1, "v"),)
    records = tuple(
        FragmentRecord(url, i * ROWS, (i + 1) * ROWS, f"{number}-{i}", mib * MIB)
        for i in range(fragments)
    )
    schemas = dict.fromkeys(["source", *stages], SCHEMA)
    listed = {url: files[0]}
    return PartitionPlan(f"p{number}", plans, files, listed, records, schemas=schemas)


@pytest.fixture
def wave() -> Iterator[Callable[..., Wave]]:
    made: list[Wave] = []

    def make(*given: Any, **options: Any) -> Wave:
        made.append(Wave(*given, **options))
        return made[-1]

    yield make
    for each in made:
        each.state.close()


def computed(calls: Sequence[Call]) -> list[int]:
    return sorted(row for call in calls for row in call.rows)


# One fragment


def test_a_fragment_is_loaded_once_sliced_and_gathered(wave):
    made = wave(mapped()).run()
    assert [call.kind for call in made.lease.calls if call.kind != "slice"] == ["load", "gather"]
    slices = made.lease.sent("slice")
    assert computed(slices) == list(range(ROWS))
    assert {call.worker.name for call in slices} == {"m-0", "m-1"}
    assert {call.worker.pool for call in made.lease.sent("load", "gather")} == {IO_WORKERS}
    assert made.part().rows == ROWS
    assert made.part().rows_in == ROWS


# Several fragments


def test_the_oldest_fragment_goes_first(wave):
    made = wave(mapped(), partitions=(4,)).run()
    fragments = [call.fragment for call in made.lease.sent("slice")]
    assert len(set(fragments)) == 4
    assert fragments == sorted(fragments, key=fragments.index), "one after the other"
    assert fragments[0] == made.lease.sent("load")[0].fragment
    assert made.lease.most == {"m": 2, IO_WORKERS: 2}, "one call at work, and one queued"


def most_in_progress(lease: Lease) -> int:
    most, active = 0, set()
    events = [(call.ticket, True, call) for call in lease.sent("load")]
    by_fragment = {call.fragment: call for call in lease.sent("gather")}
    events += [(call.ticket + 0.5, False, call) for call in by_fragment.values()]
    for _, begins, call in sorted(events, key=lambda event: event[0]):
        (active.add if begins else active.discard)(call.fragment)
        most = max(most, len(active))
    return most


def test_fragments_beyond_the_memory_budget_wait(wave):
    free = wave(mapped(), partitions=(6,), mib=8).run()
    assert most_in_progress(free.lease) > 1
    tight = wave(mapped(), partitions=(6,), mib=8, budget=1).run()
    assert most_in_progress(tight.lease) == 1
    assert len(tight.state.parts[0, "model"]) == 6


@pytest.mark.parametrize("slow", ["first", "last"])
def test_workers_wait_for_input_behind_a_slow_stage_and_for_room_before_it(wave, slow):
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    first = docs.map_batches("first", same, schema={"x": "BIGINT"}, batch_size=8)
    first.map_batches("last", same, schema={"x": "BIGINT"}, batch_size=8)
    made = wave(
        docs,
        lambda call: replace(done(call), seconds=4.0 if call.stage == slow else 0.01),
        (20,),
        workers=1,
    )
    made.pools = {name: replace(pool, identity=name) for name, pool in made.pools.items()}
    made.lease._workers = [*made.lease._workers, Worker("f", "first"), Worker("l", "last")]
    made.run()
    times = {pool.stages: pool for pool in made.events[-1].pools}
    before, after = times["first",].shares, times["last",].shares
    assert (before if slow == "first" else after)["computing"] > 0.9
    assert (after["input"] if slow == "first" else before["room"]) > 0.9


def quick(call: Call) -> WorkReport:
    """A fragment takes 64 ms."""
    return replace(done(call), seconds=done(call).seconds / 10)


def test_quick_fragments_without_a_gpu_are_computed_whole_by_one_worker(wave):
    made = wave(mapped(), quick, (12,), has_gpu=False).run()
    kinds = Counter(call.kind for call in made.lease.calls)
    assert kinds["whole"] >= 8
    assert kinds["load"] == kinds["gather"] <= 4, "until their speed is known"
    assert {call.worker.pool for call in made.lease.sent("whole")} == {"m"}
    on_gpu = wave(mapped(), quick, (12,)).run()
    assert on_gpu.lease.sent("whole") == []


def test_a_fragment_does_not_take_longer_in_a_run_of_more_partitions(wave, monkeypatch):
    looked = list[PartitionPlan]()
    monkeypatch.setattr(PartitionPlan, "is_sample", property(looked.append))
    wave(mapped(), partitions=(1,) * 30).run()
    assert len(looked) <= 60, "once for the run, once for the limit of failed rows"


# Waves


def chain() -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    clean = docs.project("clean", ["x"])
    clean.map_batches("model", same, schema={"x": "BIGINT"}, batch_size=1)
    return docs


def test_within_a_wave_rows_go_on_in_memory(wave):
    made = wave(chain()).run()
    assert [call.kind for call in made.lease.calls if call.stage == "clean"] == ["whole"]
    assert made.lease.sent("load") == [], "the project's rows are the map's input"
    assert made.part().rows == ROWS


def test_the_next_fragment_is_prepared_while_the_model_computes(wave):
    made = wave(chain(), partitions=(3,)).run()
    kinds = [(call.stage, call.kind) for call in made.lease.calls]
    assert kinds[: kinds.index(("model", "gather"))].count(("clean", "whole")) > 1


# Lost workers


def poisoned(row: int, **loss: Any) -> Callable[[Call], Outcome]:

    def outcome(call: Call) -> Outcome:
        return Lost(**loss) if call.kind == "slice" and row in call.rows else None

    return outcome


def test_a_row_that_ends_its_workers_is_isolated_and_rejected(wave):
    poison = 37
    made = wave(mapped(**QUARANTINE), poisoned(poison)).run()
    (reject,) = made.lease.sent("reject")
    assert list(reject.rows) == [poison]
    assert isinstance(reject.work.op, Reject)
    assert reject.work.op.error == WORKER_DIED
    assert reject.work.op.message.startswith("ended 2 workers, each while processing only this row")
    answered = [call for call in made.lease.answered if call.kind == "slice"]
    assert computed(answered) == [row for row in range(ROWS) if row != poison], "each once"
    assert (made.part().rows, made.part().quarantined) == (ROWS - 1, 1)
    assert made.failures == {}


@pytest.mark.parametrize("options", [QUARANTINE, {}])
def test_the_slices_of_a_lost_node_are_sent_again_as_they_are(wave, options):
    losses = iter(range(6))

    def outcome(call: Call) -> Outcome:
        is_lost = call.kind == "slice" and 5 in call.rows and next(losses, None) is not None
        return Lost("outside") if is_lost else None

    made = wave(mapped(**options), outcome, workers=1).run()
    sizes = [len(call.rows) for call in made.lease.sent("slice") if 5 in call.rows]
    assert set(sizes) == {ROWS // 2}
    assert len(made.lease.replaced) == 6
    assert made.lease.sent("reject") == []
    assert made.part().rows == ROWS
    assert made.failures == {}


def test_a_row_under_suspicion_is_alone_at_its_worker(wave):
    made = wave(mapped(**QUARANTINE), poisoned(5), workers=1).run()
    first, queued, *later = made.lease.sent("slice")
    assert first.worker == queued.worker
    assert 5 not in queued.rows
    alone = [call for call in later if call.work.alone]
    assert {*computed(alone)} >= {*queued.rows}, "what was only queued is alone, too"
    assert len([call for call in alone if list(call.rows) == [5]]) == 2
    assert len({call.work.alone for call in alone}) == len(alone)
    assert made.lease.together.isdisjoint(call.ticket for call in alone)
    assert not first.work.alone


def test_a_call_is_repeated_as_it_was_after_the_loss_of_a_node(wave):
    """A batch that is alone may be passed row by row."""
    losses = iter([Lost("outside")])
    made = wave(
        mapped(**QUARANTINE), lambda call: next(losses, None) if call.kind == "slice" else None
    )
    slices = made.run().lease.sent("slice")
    assert len([call for call in slices if call.rows == slices[0].rows]) == 2
    assert not any(call.work.alone for call in slices)


@pytest.mark.parametrize("options", [QUARANTINE, {}])
@pytest.mark.parametrize("has_begun", [True, False])
def test_the_deaths_of_another_runs_calls_count_against_no_row(wave, options, has_begun):
    """It has calls in the same workers, and ends the first 40 of them."""
    losses = iter(range(40))

    def outcome(call: Call) -> Outcome:
        if call.kind != "slice" or next(losses, None) is None:
            return None
        if call.work.alone and has_begun:
            return None  # then no other call runs
        return Lost("outside" if call.work.alone else "unclear")  # as `RayLease._cause` tells

    made = wave(mapped(batch_size=1, **options), outcome, workers=1, partitions=(2,)).run()
    assert len(made.lease.replaced) >= (2 if has_begun else 30)
    assert made.lease.sent("reject") == []
    assert made.failures == {}
    answered = [call for call in made.lease.answered if call.kind == "slice"]
    assert computed(answered) == sorted([*range(ROWS)] * 2), "each once"


def test_a_call_that_exceeds_its_timeout_is_told_by_the_clock(wave):
    def hanging(after: float, **known: float) -> Any:
        made = wave(mapped(**QUARANTINE, timeout_s=5), poisoned(7, after=after, **known)).run()
        (reject,) = made.lease.sent("reject")
        assert isinstance(reject.work.op, Reject)
        return made, reject.work.op

    made, slow = hanging(5.5)
    assert slow.error == TIMED_OUT
    assert slow.message.startswith("took longer than timeout_s=5")
    assert any("may have taken longer than timeout_s=5" in text for text in made.notices)
    _, quick = hanging(1.0)
    assert quick.error == WORKER_DIED
    _, waited_for_another_run = hanging(5.5, seconds=1.0)
    assert waited_for_another_run.error == WORKER_DIED


def test_a_model_out_of_memory_is_replaced_and_its_rows_halved(wave):
    def outcome(call: Call) -> Outcome:
        if call.kind != "slice" or len(call.rows) <= 8:
            return None
        fault = Fault("UdfError", "out of memory")
        return WorkReport(fault=fault, unhealthy_reason="its model is dead")

    made = wave(mapped(**QUARANTINE), outcome, workers=1).run()
    answered = [call for call in made.lease.answered if call.kind == "slice"]
    small = [call for call in answered if len(call.rows) <= 8]
    assert computed(small) == list(range(ROWS))
    assert made.part().quarantined == 0
    large = len(answered) - len(small)
    assert len(made.lease.replaced) == large


def test_without_quarantine_a_slice_is_computed_again_alone_three_times(wave):
    made = wave(mapped(), poisoned(7)).run()
    assert len(made.lease.sent("load")) == 1
    ended = [call for call in made.lease.sent("slice") if 7 in call.rows]
    assert [bool(call.work.alone) for call in ended] == [False, *[True] * 4]
    assert set(made.failures) == {("model", "p0")}
    message = made.failures["model", "p0"]
    assert "its worker or its data was lost 4 times, the last time: lost" in message
    assert "on_error='quarantine' isolates it" in message
    assert made.state.parts[0, "model"] == {}


def test_a_fragment_whose_whole_task_was_lost_starts_over_with_calls_alone(wave):
    lost: list[Call] = []

    def outcome(call: Call) -> Outcome:
        if call.kind != "whole" and not (lost and call.fragment == lost[0].fragment):
            return quick(call)
        lost[:] = lost or [call]
        is_poison = call.fragment == lost[0].fragment and call.kind in ("whole", "slice")
        return Lost() if is_poison else quick(call)

    made = wave(mapped(), outcome, (12,), has_gpu=False).run()
    mine = [call for call in made.lease.calls if call.fragment == lost[0].fragment]
    assert [call.kind for call in mine][:2] == ["whole", "load"]
    assert not mine[0].work.alone
    assert all(call.work.alone for call in mine[1:])
    assert len([call for call in mine if call.kind == "slice" and 0 in call.rows]) <= 4
    assert "its worker or its data was lost 4 times" in made.failures["model", "p0"]


# The end of a wave before its time


def test_a_fragment_whose_data_was_lost_starts_over_with_the_same_workers(wave):
    lost: list[Call] = []

    def outcome(call: Call) -> Outcome:
        if call.kind == "gather" and (not lost or call in lost):
            lost[:] = [call]
            return Lost("table")
        return None

    made = wave(mapped(), outcome).run()
    assert len(made.lease.sent("load")) == len(made.lease.sent("gather")) == 2
    assert made.lease.replaced == []
    assert made.part().rows_in == ROWS
    assert made.state.stats[0, "model"].rows_in == ROWS, "the first attempt does not count"


def test_a_cancelled_run_sends_nothing_more(wave):
    def outcome(call: Call) -> Outcome:
        if call.kind == "slice":
            made.cancelled.set()
        return None

    made = wave(mapped(), outcome)
    with pytest.raises(Cancelled):
        made.run()
    assert made.lease.sent("slice")
    assert {call.sent_at for call in made.lease.sent("slice")} == {
        made.lease.sent("slice")[0].sent_at
    }
    assert made.lease.sent("gather") == []


def test_an_expired_lease_ends_the_run(wave):
    made = wave(mapped(), lambda call: WorkReport(cancelled=True))
    with pytest.raises(ComputeError, match="lease lease expired"):
        made.run()


def test_a_lost_cluster_is_reported_with_the_stages_of_the_wave(wave):
    made = wave(mapped())
    answers = made.lease.wait

    def wait(timeout: float) -> list[CallResult]:
        if made.lease.sent("slice"):
            raise ClusterLostError("the head is gone")
        return answers(timeout)

    made.lease.wait = wait
    with pytest.raises(ClusterLostError, match="stages 'docs/model': the head is"):
        made.run()


# Partitions of other runs


@pytest.mark.parametrize("is_written", [True, False])
def test_a_partition_that_another_run_computes_is_put_back(wave, is_written):
    part = Part(StoragePath("/nowhere"), PartInfo("k", "d", ROWS, 10, rows_in=ROWS))
    made = wave(mapped(), partitions=(2, 1), found={"model": {0: part}} if is_written else {})
    table = ClaimTable()
    names = [[made.state.claim_name(partition, "model")] for partition in range(2)]
    other = TableClaims(table, "other", made.clock)
    other.ask(names[:1])
    made.state.claims = TableClaims(table, "run", made.clock)
    made.run()
    order = [call.fragment for call in made.lease.sent("load")]
    first, second, last = (str(f) for p in made.state.plan.partitions for f in p.fragments)
    assert order == ([last, second] if is_written else [last, first, second])
    assert len(made.state.parts[0, "model"]) == 2
    assert made.clock.now > 1030, "then the other run's claims have expired"
    assert not any(answer.held_by for answer in other.ask(names)), "all are released"
