"""Lanes: the workers of one pool, what waits for them, and how much each is handed at once."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.declare.stage import MapBatchesSpec
from vane_dagster.execute.backend import Worker

_SLICE_SECONDS = 0.1
_DRIVER_SECONDS = 0.005
DEFAULT_BATCH = 4096
"""Rows that a stage without a batch size is handed at least, where there are as many."""
_FIRST_BATCHES = 4


@dataclass
class Speed:
    """Seconds a row of a stage, learnt from its slices."""

    seconds: float | None = None

    def learn(self, seconds: float, rows: int) -> None:
        """Takes in a slice's time; half of what is known is the last one's."""
        if rows:
            measured = seconds / rows
            self.seconds = measured if self.seconds is None else (self.seconds + measured) / 2


def unit_rows(spec: MapBatchesSpec) -> int:
    """Least rows of a slice: a batch, or as many batches as an async worker has in flight."""
    batches = spec.max_concurrency if spec.udf.is_async else 1
    return (spec.batch_size or DEFAULT_BATCH) * batches


def slice_rows(left: int, unit: int, workers: int, speed: Speed, last: bool) -> int:
    """Rows of the next slice of a table: whole units worth some 100 ms, fewer towards the end.

    Args:
        left: Rows of the table that are not handed out.
        unit: Rows of which a slice has a multiple, but for the last of a table.
        workers: Workers of the pool.
        speed: What is known of the stage.
        last: Whether nothing else waits, so that the workers should end together.
    """
    if speed.seconds is None:
        wanted = min(_FIRST_BATCHES * unit, math.ceil(left / max(1, 2 * workers)))
    else:
        pace = max(_SLICE_SECONDS, _DRIVER_SECONDS * workers)
        wanted = int(pace / max(speed.seconds, 1e-12))
        if last:
            wanted = min(wanted, math.ceil(left / max(1, 2 * workers)))
    return min(left, unit * max(1, math.ceil(min(wanted, left) / unit)))


@dataclass
class Lane:
    """A pool's workers and the calls that wait for one.

    Attributes:
        slots: Calls in flight in one worker, at most.
        busy: Workers that are ready, and the rows of each call that they have.
        loading: Workers that still construct their model.
    """

    slots: int
    busy: dict[Worker, list[int]] = field(default_factory=dict)
    loading: set[Worker] = field(default_factory=set)
    _heap: list[tuple[Any, int, Any]] = field(default_factory=list)
    _order: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    @property
    def size(self) -> int:
        """Workers, ready or not."""
        return len(self.busy) + len(self.loading)

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

    def free_worker(self) -> Worker | None:
        """The worker with a free slot that has the fewest rows and calls, None without one."""
        free = [worker for worker, calls in self.busy.items() if len(calls) < self.slots]
        return min(free, key=lambda w: (sum(self.busy[w]), len(self.busy[w])), default=None)

    def begin(self, worker: Worker, rows: int) -> None:
        """A worker was handed a call of so many rows."""
        self.busy[worker].append(rows)

    def end(self, worker: Worker, rows: int) -> None:
        """A worker has answered such a call."""
        if worker in self.busy:
            self.busy[worker].remove(rows)

    def ready(self, worker: Worker) -> None:
        """A worker has constructed its model."""
        self.loading.discard(worker)
        self.busy.setdefault(worker, [])

    def clear(self) -> None:
        """All workers are gone."""
        self.busy.clear()
        self.loading.clear()

    def lose(self, worker: Worker) -> bool:
        """A worker is gone; False if that was known."""
        known = worker in self.busy or worker in self.loading
        self.busy.pop(worker, None)
        self.loading.discard(worker)
        return known
