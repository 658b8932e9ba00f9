"""The workers of a wave: a queue of work for each pool, starts, replacements, and sharing.

Workers that are lost are replaced, and pools whose workers cannot start are given up. Other runs
may have the same workers under lease; the calls of the run with the highest priority go first.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.compute.api import IO_POOL, Done, Lease, Worker
from vane_dagster.compute.waits import Waits, short
from vane_dagster.errors import ModelLoadError, VaneError
from vane_dagster.events import Event, Noticed, Printed, WorkerReady
from vane_dagster.pipeline.options import STARTUP_SECONDS
from vane_dagster.worker.protocol import Fault, LoadReport, PoolSpec, Starting, load_failed


@dataclass
class Lane:
    """A pool's workers and the calls that wait for one.

    Attributes:
        slots: Calls in flight in one worker, at most.
        busy: Workers that are ready, and the rows of each call that they have.
        loading: Workers that still construct their model.
        alone: Workers whose one call tolerates no other beside it.
        leaving: Workers that are replaced when they have answered their calls.
        yields: Workers that a run of higher priority uses too: they get one call at a time.
    """

    slots: int
    busy: dict[Worker, list[int]] = field(default_factory=dict)
    loading: set[Worker] = field(default_factory=set)
    alone: set[Worker] = field(default_factory=set)
    leaving: dict[Worker, list[int]] = field(default_factory=dict)
    yields: set[Worker] = field(default_factory=set)
    _heap: list[tuple[Any, int, Any]] = field(default_factory=list)
    _order: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    @property
    def size(self) -> int:
        """Workers, ready or not."""
        return len(self.busy) + len(self.loading) + len(self.leaving)

    def place(self, worker: Worker) -> int:
        """A number for a worker, the same in each run of the same workers."""
        return sorted(w.name for w in (*self.busy, *self.loading)).index(worker.name)

    def push(self, priority: Any, item: Any) -> None:
        """Queues an item; the smallest priority goes first."""
        heapq.heappush(self._heap, (priority, self._order(), item))

    def peek(self) -> Any:
        """The next item, None without one."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Any:
        """Takes the next item out."""
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)

    def free_worker(self, alone: bool = False) -> Worker | None:
        """The worker with a free slot that has the fewest rows and calls, None without one.

        Args:
            alone: Whether it must have no call at all.
        """
        able = ((w, calls) for w, calls in self.busy.items() if w not in self.alone)
        free = [
            w for w, calls in able if len(calls) < (1 if alone or w in self.yields else self.slots)
        ]
        return min(free, key=lambda w: (sum(self.busy[w]), len(self.busy[w])), default=None)

    def begin(self, worker: Worker, rows: int, alone: bool = False) -> None:
        """A worker was handed a call of so many rows."""
        self.busy[worker].append(rows)
        if alone:
            self.alone.add(worker)

    def end(self, worker: Worker, rows: int) -> None:
        """A worker has answered such a call."""
        self.alone.discard(worker)
        for calls in (self.busy.get(worker), self.leaving.get(worker)):
            if calls is not None:
                calls.remove(rows)

    def retire(self, worker: Worker) -> None:
        """A worker is handed no more calls."""
        if worker in self.busy:
            self.leaving[worker] = self.busy.pop(worker)

    @property
    def drained(self) -> list[Worker]:
        """Workers that are handed no more calls and have answered the last; see `lose`."""
        return [worker for worker, calls in self.leaving.items() if not calls]

    def ready(self, worker: Worker) -> None:
        """A worker has constructed its model."""
        self.loading.discard(worker)
        self.busy.setdefault(worker, [])

    def clear(self) -> None:
        """All workers are gone."""
        self.busy.clear()
        self.loading.clear()
        self.leaving.clear()

    def lose(self, worker: Worker) -> bool:
        """A worker is gone; False if that was known."""
        known = worker in self.busy or worker in self.loading or worker in self.leaving
        self.busy.pop(worker, None)
        self.loading.discard(worker)
        self.leaving.pop(worker, None)
        return known


_MOST_FAILED_STARTS = 3
_PATIENCE_SECONDS = 30.0
_GATHER_SECONDS = 10.0


class Crew:
    """The workers that a lease gave, in a lane for each pool.

    Args:
        lease: The lease.
        pools: The pool of each stage that has one.
        emit: Takes events.
        ready: Called with the stages of a worker that is ready, and what it said.
        give_up: Called with the stages whose pool cannot start, and why.
    """

    def __init__(
        self,
        lease: Lease,
        pools: Mapping[str, PoolSpec],
        emit: Callable[[Event], None],
        ready: Callable[[Sequence[str], LoadReport], None],
        give_up: Callable[[Sequence[str], VaneError], None],
    ) -> None:
        self._lease, self._pools, self._emit = lease, pools, emit
        self._ready, self._give_up = ready, give_up
        slots = {pool.identity: pool.slots for pool in pools.values()} | {IO_POOL: 1}
        limits = {pool.identity: pool.upkeep.startup_timeout_s for pool in pools.values()}
        self.lanes = {identity: Lane(count + 1) for identity, count in slots.items()}
        self._limits = {IO_POOL: STARTUP_SECONDS, **limits}
        self._failed_starts = dict.fromkeys(self.lanes, 0)
        self._patient_since = time.perf_counter()
        self._unable: dict[str, tuple[Worker, VaneError]] = {}
        self._unable_since = 0.0
        self._starting: dict[int, Worker] = {}
        self._asked: dict[int, Worker] = {}
        self._ask_at: dict[Worker, float] = {}
        for worker in lease.workers():
            self._start(worker)

    @property
    def size(self) -> int:
        """Workers of all lanes, ready or not."""
        return sum(lane.size for lane in self.lanes.values())

    def lane(self, stage: str, calls_model: bool) -> Lane:
        """The lane for a stage's work: its own pool's, or the one for reading and writing."""
        return self.lanes[self._pools[stage].identity if calls_model else IO_POOL]

    def _start(self, worker: Worker) -> None:
        self.lanes[worker.pool].loading.add(worker)
        self._starting[self._lease.load(worker)] = worker
        self._ask_at[worker] = time.monotonic() + self._limits[worker.pool]

    def settle(self, done: Done) -> bool:
        """Takes the answer to a start, or to how one goes; False if the call was another."""
        if (worker := self._asked.pop(done.ticket, None)) is not None:
            if isinstance(done.report, Starting):
                self._goes(worker, done.report)
            return True
        if (worker := self._starting.pop(done.ticket, None)) is None:
            return False
        self._ask_at.pop(worker, None)
        if isinstance(done.report, LoadReport):
            self._started(worker, done.report)
        else:
            self.lost(worker, done.lost, starting=True)
        return True

    def _goes(self, worker: Worker, starting: Starting) -> None:
        """Gives up a worker whose start takes too long; one that has no place yet has not begun."""
        if worker not in self._ask_at:
            return
        limit, seconds = self._limits[worker.pool], starting.seconds
        if seconds is None or seconds < limit:
            self._ask_at[worker] = time.monotonic() + max(1.0, limit - (seconds or limit))
            return
        del self._ask_at[worker]
        labels = [p.label for p in self._pools.values() if p.identity == worker.pool]
        message = (
            f"{labels[0] if labels else worker.pool} was not constructed within {limit:g} seconds. "
            "It may wait for something: see below where it was; if it only takes longer, raise "
            "startup_timeout_s"
        )
        stack = "What it was at (most recent call last):\n" + starting.at
        self._started(worker, load_failed(Fault("ModelLoadError", message, stack)))

    def _started(self, worker: Worker, report: LoadReport) -> None:
        """A worker says that it is ready, or why it will never be."""
        stages = self.stages(worker)
        if report.output:
            self._emit(Printed(", ".join(stages) or IO_POOL, report.output))
        if worker not in self.lanes[worker.pool].loading:  # its pool was given up
            return
        if report.outdated:
            self.lanes[worker.pool].lose(worker)
            text = f"worker {worker.name} {report.outdated}: a fresh one takes its place"
            self._emit(Noticed(text))
            self._start(self._lease.replace(worker))
            return
        if report.sick:
            self.lost(worker, report.sick, starting=False)
            return
        if report.fault is not None:
            self._unable_since = self._unable_since or time.perf_counter()
            self._unable.setdefault(worker.pool, (worker, report.fault.error()))
            self._give_up_unable()
            return
        self._failed_starts[worker.pool] = 0
        self.lanes[worker.pool].ready(worker)
        if stages:
            label = self._pools[stages[0]].label
            self._emit(WorkerReady(stages, label, worker.name, report))
        self._give_up_unable()
        self._ready(stages, report)

    def ended(self, worker: Worker, rows: int, spent: str) -> None:
        """A worker has answered a call of so many rows; a spent one is replaced after its last."""
        lane = self.lanes[worker.pool]
        lane.end(worker, rows)
        if spent and worker in lane.busy:
            lane.retire(worker)
            self._emit(Noticed(f"worker {worker.name} {spent}: a fresh one takes its place"))
        for drained in lane.drained:
            lane.lose(drained)
            self._start(self._lease.replace(drained))

    def lost(self, worker: Worker, reason: str, starting: bool) -> None:
        """A worker is gone: another takes its place, unless they die one after the other."""
        self._ask_at.pop(worker, None)
        if not self.lanes[worker.pool].lose(worker) or worker.pool in self._unable:
            return
        self._emit(Noticed(f"worker {worker.name} was lost: {reason}"))
        self._failed_starts[worker.pool] += starting
        if self._failed_starts[worker.pool] <= _MOST_FAILED_STARTS:
            self._start(self._lease.replace(worker))
            return
        error = ModelLoadError(
            f"worker {worker.name} died while its model was constructed, "
            f"{_MOST_FAILED_STARTS + 1} times in a row; the last time: {reason}. It may have run "
            "out of memory, or crashed in native code"
        )
        self._give_up_pool(worker, error)

    def _give_up_unable(self) -> None:
        """Gives up the pools that cannot start, once it is known of the others whether they can.

        So all that cannot be imported or constructed is told at once. One that is below another
        is given up before it, else only the upper one would be told.
        """
        answered = all(
            lane.busy or not lane.loading or pool in self._unable or pool == IO_POOL
            for pool, lane in self.lanes.items()
        )
        late = time.perf_counter() - self._unable_since > _GATHER_SECONDS
        if IO_POOL in self._unable or (self._unable and (answered or late)):
            order = [*(pool.identity for pool in self._pools.values()), IO_POOL]
            unable = sorted(self._unable, key=order.index, reverse=True)
            given_up = [self._unable.pop(pool) for pool in unable]
            self._unable_since = 0.0
            for worker, error in given_up:
                self._give_up_pool(worker, error)

    def _give_up_pool(self, worker: Worker, error: VaneError) -> None:
        self._lease.evict(worker.pool)
        self.lanes[worker.pool].clear()
        stages = self.stages(worker)
        if not stages:
            raise error
        self._give_up(stages, error)

    def stages(self, worker: Worker) -> tuple[str, ...]:
        """The stages that a worker serves."""
        return tuple(s for s, pool in self._pools.items() if pool.identity == worker.pool)

    def look_after_starts(self) -> None:
        """Every half minute, says which pools have no worker yet; gives up those that cannot.

        Workers that take too long are asked what they are at.
        """
        self._give_up_unable()
        for worker, due in list(self._ask_at.items()):
            if time.monotonic() >= due:
                self._asked[self._lease.starting(worker)] = worker
                self._ask_at[worker] = math.inf
        if time.perf_counter() - self._patient_since < _PATIENCE_SECONDS:
            return
        self._patient_since = time.perf_counter()
        for pool in {pool.identity: pool for pool in self._pools.values()}.values():
            lane = self.lanes[pool.identity]
            if lane.loading and not lane.busy:
                wants = ", ".join(f"{amount:g} {name}" for name, amount in pool.bundle.items())
                self._emit(
                    Noticed(
                        f"{pool.label}: none of its {len(lane.loading)} workers"
                        f"{f' of {wants} each' * bool(wants)} is ready yet: the model is being "
                        "constructed, or others hold what it needs"
                    )
                )


_TELL_AFTER_SECONDS = 5.0


class Sharing:
    """Follows which runs share the workers of a lease.

    A worker serves its calls in the order in which they were made, and a run keeps one at work and
    one queued. Where a run of higher priority uses the same worker, this one keeps one alone. So
    of a worker that both keep busy, the run of higher priority gets two calls for each of the
    other; none is stopped, and no call at work is interrupted.

    Args:
        lease: The lease.
        pools: The pool of each stage that has one.
        priority: The run's.
        waits: Is told which runs the models are shared with.
    """

    def __init__(
        self, lease: Lease, pools: Mapping[str, PoolSpec], priority: int, waits: Waits
    ) -> None:
        self._lease, self._priority, self._waits = lease, priority, waits
        self._labels = {pool.identity: pool.label for pool in pools.values()}

    def follow(self, lanes: Mapping[str, Lane]) -> None:
        """Takes in who shares the workers now; to be called often."""
        sharers = self._lease.sharers()
        for identity, lane in lanes.items():
            others = {
                worker: sharers[worker.name] for worker in lane.busy if worker.name in sharers
            }
            lane.yields = {
                worker
                for worker, found in others.items()
                if any(other.priority > self._priority for other in found)
            }
            if identity == IO_POOL:
                continue
            label = self._labels[identity]
            if not others:
                self._end(label)
                continue
            if not any(lane.busy.values()):  # idle: nothing to say, and still shared
                continue
            runs = sorted({other.run_id for found in others.values() for other in found})
            text = f"{label}: {len(others)} of {len(lane.busy)} workers also serve {short(runs)}"
            text += ", of higher priority" if lane.yields else ""
            self._waits.begin(f"pool {label}", text, runs, _TELL_AFTER_SECONDS)

    def close(self) -> None:
        """The lease ends."""
        for label in self._labels.values():
            self._end(label)

    def _end(self, label: str) -> None:
        reason = f"pool {label}"
        runs = short(self._waits.runs(reason))
        self._waits.end(reason, f"{label}: no longer shares workers with {runs}")
