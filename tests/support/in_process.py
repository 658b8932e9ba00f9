"""A backend whose workers are hosts in this process: real operations and stores, no processes."""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pyarrow as pa

import vane_dagster as vd
from vane_dagster import _failpoints
from vane_dagster.compute.api import CallResult, Capacity, Worker
from vane_dagster.compute.work_claims import Claims
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.executor import execute
from vane_dagster.events import Committed, Event, Failed
from vane_dagster.orchestration.resources import Compute
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.store import Store
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.host import Host
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import Output, WorkerStatus


class InProcess:
    """See the module. A call is answered when the run waits for one."""

    def __init__(self, order: Callable[[int], int] = lambda count: 0) -> None:
        self._order = order
        self._hosts: dict[Worker, Host] = {}
        self._pools: dict[str, PoolSpec] = {}
        self._workers: list[Worker] = []
        self._tickets = itertools.count()
        self._calls: list[tuple[int, Callable[[], CallResult]]] = []
        self.id = "lease"

    # Backend

    def capacity(self) -> Capacity:
        return Capacity(({"CPU": 2.0},), 1 << 30, is_cluster=False)

    def running(self) -> set[str]:
        return set()

    def variables(self) -> None:
        return None

    def claims(self, run_id: str) -> Claims:
        return Claims()

    def lease(self, run_id: str, pools: Sequence[PoolSpec], *_: Any) -> InProcess:
        self._pools = {pool.identity: pool for pool in pools}
        self._workers = [
            Worker(f"{pool.identity}-{n}", pool.identity)
            for pool in pools
            for n in range(min(2, pool.workers[1]))
        ]
        return self

    def close(self) -> None:
        self._hosts.clear()

    # Lease

    def workers(self) -> list[Worker]:
        return list(self._workers)

    def load(self, worker: Worker, endpoints: Any) -> int:
        pool = self._pools[worker.pool]
        host = self._hosts.setdefault(worker, Host())
        env = dict(_failpoints.variables())
        call = LoadCall(pool.model, pool.archive, 1, env, pool.lifecycle, endpoints)

        def answer(ticket: int) -> CallResult:
            # The code that a worker is sent has part of `support`, which processes that later tests
            # spawn with this path must not find first.
            # To find the libraries whose threads it limits takes longer than all else that it does.
            limits = mock.patch("threadpoolctl.threadpool_limits", new=int)  # sets nothing
            with mock.patch.object(sys, "path", list(sys.path)), limits:
                return CallResult(ticket, _silent(host.load(call)))

        return self._call(answer)

    def status(self, worker: Worker) -> int:
        return self._call(lambda ticket: CallResult(ticket, WorkerStatus()))

    def run(self, worker: Worker, work: Work, tables: Sequence[pa.Table]) -> int:
        def answer(ticket: int) -> CallResult:
            if worker not in self._hosts:
                return CallResult(ticket, None, lost="replaced")
            table, report = self._hosts[worker].run(work, *tables)
            return CallResult(ticket, _silent(report), table)

        return self._call(answer)

    def put(self, rows: pa.Table) -> pa.Table:
        return rows

    fetch = put

    def _call(self, answer: Callable[[int], CallResult]) -> int:
        ticket = next(self._tickets)
        self._calls.append((ticket, lambda: answer(ticket)))
        return ticket

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        del self._hosts[worker]
        fresh = Worker(f"{worker.name}'", worker.pool)
        self._workers = [fresh if each == worker else each for each in self._workers]
        return fresh

    def moves(self) -> list[tuple[Worker, Worker]]:
        return []

    def wait(self, timeout: float) -> list[CallResult]:
        if not self._calls:
            return []
        _, call = self._calls.pop(self._order(len(self._calls)) % len(self._calls))
        return [call()]

    def release(self) -> None:
        self._calls.clear()


def _silent(report: Any) -> Any:
    """Leave out what was printed meanwhile: in this process, that is not the user's code alone."""
    return replace(report, output=Output())


class InProcessCompute(Compute):
    def backend(self) -> Any:
        return InProcess()


def executed(
    pipeline: vd.Pipeline,
    store: Store,
    partitions: Sequence[str | None],
    backend: InProcess,
    keys: Sequence[str] = (),
    run_id: str | None = None,
    stages: Sequence[str] = (),
    **options: Any,
) -> list[Event]:
    """Run stages of a pipeline, by default all, and return the events of the run; see `compute`."""
    run_id = run_id or secrets.token_hex(8)

    def before(partition: str) -> Sequence[str]:
        known = keys or [key for key in partitions if key is not None]
        return known[: known.index(partition)][::-1]

    planned = plan_run(
        pipeline, tuple(stages or pipeline.stages), partitions, store, run_id=run_id, **options
    )
    if planned.failed:
        raise next(iter(planned.failed.values()))
    events: list[Event] = []
    runner = CheckRunner(pipeline, store, before)
    given: Any = backend
    execute(planned, given, store, run_id, events.append, threading.Event(), runner)
    return events


def compute(
    pipeline: vd.Pipeline,
    store: Store,
    partitions: Sequence[str | None] = (None,),
    backend: InProcess | None = None,
    run_id: str | None = None,
    keys: Sequence[str] = (),
    **options: Any,
) -> list[Event]:
    """Bring all stages of a pipeline up to date, and return the events of the run."""
    events = executed(pipeline, store, partitions, backend or InProcess(), keys, run_id, **options)
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    return events


def committed(events: Sequence[Event], stage: str) -> list[Committed]:
    return [each for each in events if isinstance(each, Committed) and each.stage == stage]
