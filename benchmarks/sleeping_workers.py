"""A cluster of workers that only sleep, for the driver's share of a run at scale.

Planner, scheduler, pool state, claims and committer are the real ones. Time is virtual: it passes
with the CPU time of this process, all threads included, and jumps to the next answer when the
driver has nothing to do. So a driver that is too slow leaves workers idle, as it would on a
cluster. The time in which Ray sends a call and collects its answer is not included.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from vane_dagster.compute.api import IO_WORKERS, CallResult, Capacity, Worker
from vane_dagster.compute.pool_state import LeaseRecord, PoolState
from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, ClaimTable
from vane_dagster.engine import executor
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.scheduler import WaveScheduler
from vane_dagster.events import Committed, Event, Failed
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.manifest import PartInfo, PartProvenance
from vane_dagster.storage.store import Store
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import SourceRows, TableRows, Work
from vane_dagster.worker.reports import LoadReport, Tally, WorkerStatus, WorkReport

_CPUS_A_NODE = 10
_IO_SECONDS = 0.02


class Clock:
    """Virtual seconds: the CPU time of this process, and the time in which it had nothing to do."""

    def __init__(self) -> None:
        self._idle = 0.0

    def __call__(self) -> float:
        return self._idle + time.process_time()

    def advance_to(self, moment: float) -> None:
        """Let the time pass until a moment, unless it is over."""
        self._idle += max(0.0, moment - self())


@dataclass(frozen=True)
class Simulated:
    """The result of a simulated run.

    Attributes:
        calls: Number of calls, of the model and of I/O workers.
        cpu_seconds: CPU seconds of the driver and its threads, to the last commit.
        busy: The share of the workers' time in calls, from the first call's start to the last end.
        steady: The same in the middle half of that time.
    """

    calls: int
    cpu_seconds: float
    busy: float
    steady: float


def simulate(plan: RunPlan, store: Store, workers: int, row_seconds: float) -> Simulated:
    """Execute a plan of one stage over workers that sleep.

    Args:
        plan: The plan.
        store: Its store, to which the manifests are committed.
        workers: Number of workers of the model.
        row_seconds: Seconds that a worker sleeps for a row.
    """
    clock, events = Clock(), list[Event]()
    cluster: Any = SleepingWorkers(plan, workers, row_seconds, clock)
    scheduler = functools.partial(WaveScheduler, clock=clock)
    began = time.process_time()
    with mock.patch.object(executor, "WaveScheduler", scheduler):
        cancelled, check_runner = threading.Event(), CheckRunner(plan.pipeline, store)
        executor.execute(plan, cluster, store, "simulated", events.append, cancelled, check_runner)
    cpu_seconds = time.process_time() - began
    if failures := [event for event in events if isinstance(event, Failed)]:
        raise RuntimeError(str(failures[0]))
    committed = sum(isinstance(event, Committed) for event in events)
    if committed != len(plan.partitions):
        raise RuntimeError(f"{committed} of {len(plan.partitions)} partitions were committed")
    start, stop = min(b for b, _ in cluster.busy), max(e for _, e in cluster.busy)
    quarter = (stop - start) / 4
    return Simulated(
        cluster.calls,
        cpu_seconds,
        _share(cluster.busy, start, stop, workers),
        _share(cluster.busy, start + quarter, stop - quarter, workers),
    )


def _share(calls: Sequence[tuple[float, float]], start: float, stop: float, workers: int) -> float:
    seconds = sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in calls)
    return seconds / (stop - start) / workers


class SleepingWorkers:
    """A backend, with its one lease and its claims.

    Args:
        plan: The plan of the run.
        count: Number of workers of the model. The nodes have a CPU for each.
        row_seconds: Seconds that a worker sleeps for a row.
        clock: The clock of the run.

    Attributes:
        calls: Number of calls.
        busy: Start and end of each call of the model, in virtual seconds.
    """

    id = "lease"

    def __init__(self, plan: RunPlan, count: int, row_seconds: float, clock: Clock) -> None:
        self.calls, self.busy = 0, list[tuple[float, float]]()
        self._row_seconds, self._clock = row_seconds, clock
        self._ranges = {
            key: (fragment.start, fragment.stop)
            for partition in plan.partitions
            for stage in partition.stages.values()
            for key, fragment in zip(stage.keys, partition.fragments)
        }
        nodes = -(-count // _CPUS_A_NODE)
        self._nodes = {f"n{i:04}": {"CPU": float(_CPUS_A_NODE)} for i in range(nodes)}
        self._pools, self._table = PoolState(), ClaimTable()
        self._workers: list[Worker] = []
        self._free_at: dict[Worker, float] = {}
        self._tickets = itertools.count()
        self._pending: list[tuple[float, int, CallResult]] = []
        self._lock = threading.Lock()

    # Backend

    def capacity(self) -> Capacity:
        return Capacity(tuple(self._nodes.values()), 1 << 44)

    def variables(self) -> None:
        return None

    def claims(self, run_id: str) -> SleepingWorkers:
        return self

    def lease(self, run_id: str, pools: Sequence[PoolSpec], *_: Any) -> SleepingWorkers:
        requests = tuple(pool.request() for pool in pools)
        record = LeaseRecord(self.id, run_id, requests, 0.0)
        grant = self._pools.request_lease(record, self._nodes, self._clock())
        assert grant is not None
        self._workers = [Worker(n, identity) for identity, ns in grant.workers.items() for n in ns]
        return self

    # Claims

    def ask(
        self, wanted: Sequence[Sequence[str]], release: Sequence[str] = (), age: float = 0.0
    ) -> Sequence[ClaimAnswer]:
        with self._lock:
            request = ClaimRequest("holder", "run", 30.0, wanted, release, age)
            return self._table.ask(request, self._clock())

    def close(self) -> None:
        pass

    # Lease

    def workers(self) -> Sequence[Worker]:
        return list(self._workers)

    def load(self, worker: Worker, endpoints: Any) -> int:
        return self._call(worker, 0.0, LoadReport(False, 0.0, 1, "cpu", "node"))

    def status(self, worker: Worker) -> int:
        return self._call(worker, 0.0, WorkerStatus())

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        self.calls += 1
        given, rows = work.inputs[0], 0
        if isinstance(given, SourceRows):
            rows = given.fragment.stop - given.fragment.start
        elif isinstance(given, TableRows) and given.stop is not None:
            rows = given.stop - given.start
        if worker.pool == IO_WORKERS:
            tally = work.tally or Tally(rows_in=rows)
            report = WorkReport(tally, rows, 0, 1000, _IO_SECONDS)
        else:
            seconds = rows * self._row_seconds
            report = WorkReport(Tally(rows_in=rows), rows, 0, 1000, seconds, seconds, 1)
        if work.target:
            report = replace(report, part=self._part(work))
        return self._call(worker, report.seconds, report)

    def _part(self, work: Work) -> PartInfo:
        assert work.target is not None
        key, (start, stop) = work.target.key, self._ranges[work.target.key]
        made = PartProvenance(work.run_id, (work.worker,), time.time(), 1.0)
        return PartInfo(
            key, "0" * 16, stop - start, 1000, start, stop - 1, stop - start, made=made,
            sample=({"id": str(start)},),
        )  # fmt: skip

    def _call(self, worker: Worker, seconds: float, report: Any) -> int:
        begin = max(self._clock(), self._free_at.get(worker, 0.0))
        self._free_at[worker] = end = begin + seconds
        if isinstance(report, WorkReport) and worker.pool != IO_WORKERS:
            self.busy.append((begin, end))
        ticket = next(self._tickets)
        heapq.heappush(self._pending, (end, ticket, CallResult(ticket, report, "table")))
        return ticket

    def wait(self, timeout: float) -> list[CallResult]:
        if not self._pending or self._pending[0][0] > self._clock():
            time.sleep(0.0002)  # the driver's other threads work
            until = self._clock() + timeout
            self._clock.advance_to(min(self._pending[0][0], until) if self._pending else until)
        done = []
        while self._pending and self._pending[0][0] <= self._clock():
            done.append(heapq.heappop(self._pending)[2])
        return done

    def moves(self) -> Sequence[tuple[Worker, Worker]]:
        return ()

    def release(self) -> None:
        self._pools.release(self.id, self._clock())
