"""The workers of a wave's lanes: started, replaced when lost, given up when they can't start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from vane_dagster.compute.api import IO_POOL, Done, Lease, Worker
from vane_dagster.engine.worker_queue import Lane
from vane_dagster.errors import ModelLoadError, VaneError
from vane_dagster.events import Event, Noticed, Printed, WorkerReady
from vane_dagster.pipeline.upkeep import STARTUP_SECONDS
from vane_dagster.worker.protocol import Fault, LoadReport, PoolSpec, Starting, load_failed

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
        for gone in lane.gone():
            self._start(self._lease.replace(gone))

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
