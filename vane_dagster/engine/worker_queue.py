"""Lanes: the workers of one pool, and what waits for them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.compute.api import Worker


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
