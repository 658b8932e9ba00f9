"""The workers of a wave: a queue of work for each pool, starts, and replacements.

Lost workers are replaced, and pools that cannot start workers are given up. Other runs may lease
the same workers, which serve all calls in their order.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster._texts import resource
from vane_dagster.compute.api import IO_WORKERS, CallResult, Lease, Worker
from vane_dagster.engine.server_group import ServerChanged, ServerGroup
from vane_dagster.errors import ModelLoadError, VaneError, names
from vane_dagster.events import Event, Noticed, Printed, WorkerReady, WorkerReplaced
from vane_dagster.pipeline.options import STARTUP_SECONDS
from vane_dagster.retries import MAX_FAILED_STARTS
from vane_dagster.servers.launch import ServerStatus
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.reports import Fault, LoadReport, WorkerStatus, load_failed


@dataclass
class WorkerQueue:
    """A pool's workers and the tasks that wait for one.

    Attributes:
        slots: Maximum number of calls in flight per worker.
        calls_by_worker: Ready workers, each with the rows of its calls.
        loading: Workers that still construct their model.
        exclusive: Workers with a call that tolerates no other beside it.
        ending: Workers that are replaced after their last call, and whether they get calls while
            no other is ready, as those on nodes that Ray drains.
    """

    slots: int
    calls_by_worker: dict[Worker, list[int]] = field(default_factory=dict)
    loading: set[Worker] = field(default_factory=set)
    exclusive: set[Worker] = field(default_factory=set)
    ending: dict[Worker, bool] = field(default_factory=dict)
    _heap: list[tuple[Any, int, Any]] = field(default_factory=list)
    _order: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    @property
    def size(self) -> int:
        """Number of workers, ready or not."""
        return len(self.calls_by_worker) + len(self.loading)

    def has(self, worker: Worker) -> bool:
        """Whether a worker is ready or loading."""
        return worker in self.calls_by_worker or worker in self.loading

    def push(self, priority: Any, task: Any) -> None:
        """Queue a task."""
        heapq.heappush(self._heap, (priority, self._order(), task))

    def peek(self) -> Any:
        """The next task; None if there is none."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Any:
        """Remove and return the next task."""
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Any]:
        return (task for _, _, task in self._heap)

    def pick_worker(self, exclusive: bool = False) -> Worker | None:
        """The worker with a free slot and the fewest rows and calls; None if there is none."""
        slots = 1 if exclusive else self.slots
        closed = self.exclusive.union(worker for worker in self.ending if not self._serves(worker))
        loads = {
            worker: (sum(calls), len(calls))
            for worker, calls in self.calls_by_worker.items()
            if len(calls) < slots and worker not in closed
        }
        return min(loads, key=loads.__getitem__, default=None)

    def begin(self, worker: Worker, rows: int, exclusive: bool = False) -> None:
        """Record a call sent to a worker."""
        self.calls_by_worker[worker].append(rows)
        if exclusive:
            self.exclusive.add(worker)

    def end(self, worker: Worker, rows: int) -> None:
        """Record a completed call."""
        self.exclusive.discard(worker)
        if worker in self.calls_by_worker:
            self.calls_by_worker[worker].remove(rows)

    def _serves(self, worker: Worker) -> bool:
        """Whether a worker that is ending gets calls."""
        return self.ending[worker] and not self.calls_by_worker.keys() - self.ending.keys()

    @property
    def ended(self) -> list[Worker]:
        """Workers that have answered their last call; see `remove`."""
        idle = [worker for worker in self.ending if not self.calls_by_worker.get(worker)]
        return [worker for worker in idle if not self._serves(worker)]

    def mark_ready(self, worker: Worker) -> None:
        """Record that a worker has constructed its model."""
        self.loading.discard(worker)
        self.calls_by_worker.setdefault(worker, [])

    def clear(self) -> None:
        """Remove all workers."""
        for worker in (*self.calls_by_worker, *self.loading):
            self.remove(worker)

    def remove(self, worker: Worker) -> bool:
        """Remove a worker; return False if it was already removed."""
        known = self.has(worker)
        self.calls_by_worker.pop(worker, None)
        self.loading.discard(worker)
        self.ending.pop(worker, None)
        return known


_START_REPORT_SECONDS = 30.0
_SERVER_STATUS_SECONDS = 1.0


class WorkerGroup:
    """The workers of a lease, with a worker queue for each pool.

    Other runs may lease the same workers. A worker serves the calls of all in the order of
    submission, and a run keeps as many executing as it has slots, and one queued. A run has no
    other call at a worker during an exclusive call; calls of other runs wait (`worker/turns.py`).

    Attributes:
        worker_queues: The worker queue of each pool, by its identity.
        is_deferred: Whether models and servers are not loaded until there is a row to compute.
    """

    def __init__(
        self,
        lease: Lease,
        pools: Mapping[str, PoolSpec],
        emit: Callable[[Event], None],
        ready: Callable[[str, Sequence[str], LoadReport], None],
        give_up: Callable[[Sequence[str], VaneError], None],
        clock: Callable[[], float] = time.monotonic,
        servers: Mapping[str, PoolSpec] | None = None,
        server_changed: ServerChanged = lambda pool, replicas, restarts: None,
        is_deferred: bool = False,
    ) -> None:
        self._lease, self._pools, self._emit = lease, pools, emit
        self._ready, self._give_up, self._clock = ready, give_up, clock
        models = {pool.identity: pool for pool in pools.values()}
        self._by_identity = {**models, **(servers or {})}
        self._servers = ServerGroup(lease, servers or {}, models, emit, server_changed)
        queues = {i: WorkerQueue(pool.slots + 1) for i, pool in self._by_identity.items()}
        self.worker_queues = {**queues, IO_WORKERS: WorkerQueue(2)}
        self.is_deferred = is_deferred
        limits = {i: pool.lifecycle.startup_timeout_s for i, pool in self._by_identity.items()}
        self._limits = {**limits, IO_WORKERS: STARTUP_SECONDS}
        self._failed_starts: dict[Worker, int] = {}
        self._last_start_report = self._clock()
        self._starting: dict[int, Worker] = {}
        self._status_calls: dict[int, Worker] = {}
        self._ask_at: dict[Worker, float] = {}
        self._leased = frozenset(lease.workers())
        self._noticed, self._said_waits = set[str](), set[str]()
        for worker in lease.workers():
            self._start(worker)

    @property
    def size(self) -> int:
        """Number of workers that get work, ready or not."""
        servers = {identity for identity, pool in self._by_identity.items() if pool.server}
        return sum(queue.size for pool, queue in self.worker_queues.items() if pool not in servers)

    def worker_queue(self, stage: str, calls_model: bool) -> WorkerQueue:
        """The worker queue for a stage's work."""
        return self.worker_queues[self._pools[stage].identity if calls_model else IO_WORKERS]

    def queued(self) -> Mapping[str, int]:
        """Return the number of tasks that wait for a worker, by stage."""
        queues = self.worker_queues.values()
        return Counter(task.stage for queue in queues for task in queue if task.is_current)

    def load(self) -> None:
        """Let the workers construct their models: there is a row to compute."""
        if self.is_deferred:
            self.is_deferred = False
            self._start_deferred()

    def _start(self, worker: Worker) -> None:
        """Let a worker construct its model, once the servers that its code calls are ready.

        The first workers wait for all replicas, so that they spread over them; later ones do not
        wait for a replica that is replaced, which may take long, or forever on a full cluster.
        """
        self.worker_queues[worker.pool].loading.add(worker)
        if not self._must_wait(worker.pool):
            self._starting[self._lease.load(worker, self._servers.endpoints_of(worker))] = worker
            self._ask_at[worker] = self._clock() + self._limits[worker.pool]

    def _must_wait(self, identity: str) -> bool:
        """Whether the workers of a pool wait for the servers that they call, or for rows."""
        if (pool := self._by_identity.get(identity)) is None:  # it reads and writes
            return False
        return self.is_deferred or any(
            self.worker_queues[server].loading & self._leased or not self._servers.answers(server)
            for server in pool.uses.values()
        )

    def _start_deferred(self) -> None:
        starting = {*self._starting.values()}
        for worker_queue in self.worker_queues.values():
            for worker in sorted(worker_queue.loading - starting):
                self._start(worker)

    def handle_done(self, done: CallResult) -> bool:
        """Handle the answer to a start or to a question for its status; False for other calls."""
        if (worker := self._status_calls.pop(done.ticket, None)) is not None:
            self._handle_status(worker, done)
            return True
        if (worker := self._starting.pop(done.ticket, None)) is None:
            return False
        self._ask_at.pop(worker, None)
        if isinstance(done.report, LoadReport):
            self._started(worker, done.report)
        else:
            self.replace_lost(worker, done.lost, starting=done.cause != "shared")
        return True

    def _handle_status(self, worker: Worker, done: CallResult) -> None:
        worker_queue = self.worker_queues[worker.pool]
        if worker in worker_queue.loading:
            if isinstance(done.report, WorkerStatus):
                self._handle_startup(worker, done.report)
        elif worker not in worker_queue.calls_by_worker:
            return
        elif not isinstance(done.report, WorkerStatus):
            if not worker_queue.calls_by_worker[worker]:  # else the answers to its calls tell
                self.replace_lost(worker, done.lost, starting=False)
        elif text := done.report.waits:
            if worker.pool not in self._said_waits:
                self._said_waits.add(worker.pool)
                where = ", ".join(self.stages(worker))
                self._emit(Noticed(f"{where}: {text} (worker {worker.name})"))
        elif (server := done.report.server) is not None:
            self._server_answered(worker, server)
            if server.state == "failed":
                label = self._by_identity[worker.pool].label
                self._fail_pool(worker, ModelLoadError(f"{label} has failed: {server.reason}"))

    def _server_answered(self, worker: Worker, server: ServerStatus) -> None:
        self._ask_at[worker] = self._clock() + _SERVER_STATUS_SECONDS
        self._servers.update(worker, server)
        self._start_deferred()

    def _handle_startup(self, worker: Worker, starting: WorkerStatus) -> None:
        """Give up a worker that starts too slowly; the time counts once it is placed on a node."""
        limit, seconds = self._limits[worker.pool], starting.seconds
        if seconds is None or seconds < limit:
            self._ask_at[worker] = self._clock() + max(1.0, limit - (seconds or limit))
            return
        pool = self._by_identity.get(worker.pool)
        message = (
            f"{pool.label if pool else worker.pool} was not constructed within {limit:g} seconds. "
            "The stack below shows where it was. If it only needs more time, raise "
            "startup_timeout_s"
        )
        stack = "Stack of the constructor (most recent call last):\n" + starting.at
        self._started(worker, load_failed(Fault("ModelLoadError", message, stack)))

    def _started(self, worker: Worker, report: LoadReport) -> None:
        """Handle a worker's report that it is ready, or why it cannot start."""
        stages = self.stages(worker)
        if (output := report.output).text:
            self._emit(Printed(", ".join(stages) or IO_WORKERS, output, worker.name))
        if worker not in self.worker_queues[worker.pool].loading:  # the pool was given up
            return
        if report.outdated:
            self.worker_queues[worker.pool].remove(worker)
            text = f"worker {worker.name} {report.outdated}; it is replaced"
            self._emit(WorkerReplaced(text, stages=stages, cause="outdated"))
            self._replace(worker, at_once=False)
            return
        if report.unhealthy_reason:
            self.replace_lost(worker, report.unhealthy_reason, starting=False)
            return
        if report.fault is not None:
            self._fail_pool(worker, report.fault.error())
            return
        self._failed_starts = {
            w: n for w, n in self._failed_starts.items() if w.pool != worker.pool
        }
        self.worker_queues[worker.pool].mark_ready(worker)
        self._servers.tell(worker)
        if stages:
            pool = self._by_identity[worker.pool]
            is_function = pool.model is not None and not pool.model.stateful
            self._emit(
                WorkerReady(stages, pool.label, worker.name, report, pool.server, is_function)
            )
        if report.server is not None:
            self._server_answered(worker, report.server)
        self._ready(worker.pool, stages, report)

    def finish_call(self, worker: Worker, rows: int, recycle_reason: str) -> None:
        """Record a completed call; replace a worker due for recycling after its last call."""
        worker_queue = self.worker_queues[worker.pool]
        worker_queue.end(worker, rows)
        is_open = worker in worker_queue.calls_by_worker and worker_queue.ending.get(worker, True)
        if recycle_reason and is_open:
            worker_queue.ending[worker] = False
            text = f"worker {worker.name} {recycle_reason}; it is replaced"
            self._emit(WorkerReplaced(text, False, self.stages(worker), "recycled"))
        self._replace_ended(worker_queue)

    def move_workers(self) -> None:
        """Start other workers for those on draining nodes; end these after their last calls."""
        for worker, fresh in self._lease.moves():
            if self.worker_queues[worker.pool].has(worker):
                text = f"worker {worker.name} is on a draining node; {fresh.name} replaces it"
                self._emit(WorkerReplaced(text, False, self.stages(worker), "drained"))
                self.worker_queues[worker.pool].ending.setdefault(worker, True)
                self._start(fresh)
        for worker_queue in self.worker_queues.values():
            self._replace_ended(worker_queue)

    def _replace_ended(self, worker_queue: WorkerQueue) -> None:
        for ended in worker_queue.ended:
            self._ask_at.pop(ended, None)
            self._servers.remove(ended)
            worker_queue.remove(ended)
            self._replace(ended, at_once=False)

    def _replace(self, worker: Worker, at_once: bool) -> Worker:
        """Start the worker that replaces one, unless it has been started."""
        fresh = self._lease.replace(worker, at_once)
        if not self.worker_queues[worker.pool].has(fresh):
            self._start(fresh)
        return fresh

    def notice_unused_gpu(self, worker: Worker, reason: str) -> None:
        """Report once for each pool that a worker reserves a GPU that it does not use."""
        pool = self._by_identity[worker.pool]
        reserved = pool.bundle.get("GPU", 0)
        if reserved and worker.pool not in self._noticed:
            self._noticed.add(worker.pool)
            text = f"{pool.label} reserves {reserved:g} GPU per worker, but {reason}"
            self._emit(Noticed(f"{names(self.stages(worker))}: {text}"))

    def replace_lost(self, worker: Worker, reason: str, starting: bool) -> None:
        """Replace a lost worker, unless too many starts in a row have failed."""
        self._ask_at.pop(worker, None)
        self._servers.remove(worker)
        if not self.worker_queues[worker.pool].remove(worker):
            return
        text = f"worker {worker.name} was lost: {reason}"
        self._emit(WorkerReplaced(text, stages=self.stages(worker)))
        # Counted over a worker and those that it replaces: many may die with their node.
        failed = self._failed_starts.pop(worker, 0) + starting
        if failed < MAX_FAILED_STARTS:
            self._failed_starts[self._replace(worker, at_once=True)] = failed
            return
        error = ModelLoadError(
            f"worker {worker.name} died while constructing its model, "
            f"{MAX_FAILED_STARTS} times in a row; the last time: {reason}. It may have run "
            "out of memory or crashed in native code"
        )
        self._fail_pool(worker, error)

    def _fail_pool(self, worker: Worker, error: VaneError) -> None:
        self._lease.evict(worker.pool)
        self.worker_queues[worker.pool].clear()
        self._ask_at = {w: due for w, due in self._ask_at.items() if w.pool != worker.pool}
        stages = self.stages(worker)
        if not stages:
            raise error
        self._give_up(stages, error)

    def stages(self, worker: Worker) -> tuple[str, ...]:
        """The stages whose code a worker runs, or whose code calls the server that it runs."""
        return tuple(
            stage
            for stage, pool in self._pools.items()
            if worker.pool in (pool.identity, *pool.uses.values())
        )

    def check_starts(self) -> None:
        """Report pools without a ready worker every half minute.

        Also ask workers that take too long to start for their status, and all servers. Workers
        with calls are asked every half minute what they wait for.
        """
        for worker, due in self._ask_at.items():
            if self._clock() >= due:
                self._status_calls[self._lease.status(worker)] = worker
                self._ask_at[worker] = math.inf
        if self._clock() - self._last_start_report < _START_REPORT_SECONDS:
            return
        self._last_start_report = self._clock()
        self._said_waits.clear()
        for pool in self._by_identity.values():
            for worker, calls in self.worker_queues[pool.identity].calls_by_worker.items():
                if calls and worker not in self._status_calls.values():
                    self._status_calls[self._lease.status(worker)] = worker
            if self._must_wait(pool.identity):
                continue
            worker_queue = self.worker_queues[pool.identity]
            if worker_queue.loading and not worker_queue.calls_by_worker:
                wants = ", ".join(resource(name, amount) for name, amount in pool.bundle.items())
                self._emit(
                    Noticed(
                        f"{pool.label}: none of its {len(worker_queue.loading)} workers"
                        f"{f' of {wants} each' * bool(wants)} is ready yet: they are starting, "
                        f"serve other runs, or wait for resources in use{_log_hint(pool)}"
                    )
                )


def _log_hint(pool: PoolSpec) -> str:
    command = f"`vane-dagster pools logs {pool.server}`"
    return f". On a Ray cluster, {command} shows its log" if pool.server else ""
