"""What waits for a worker, made into the work that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vane_dagster.compute.api import Worker
from vane_dagster.engine.failures import Again
from vane_dagster.engine.fragment_state import FragmentRun, Node, TaskKind
from vane_dagster.engine.slicing import Pacing
from vane_dagster.engine.tasks import Requests
from vane_dagster.engine.worker_queue import Lane
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.retry import TIMED_OUT


@dataclass(frozen=True)
class Item:
    """Something that waits for a worker: loading a map's input, its slices, or whole work.

    A slice has no rows yet, unless they are given out `again`.
    """

    run: FragmentRun
    epoch: int
    stage: str
    kind: TaskKind
    again: Again | None = None

    @property
    def alone(self) -> bool:
        """Whether it is a row that may end its worker, so that no other may be blamed for it."""
        return self.again is not None and self.again.rows == 1 and self.again.error is None

    @property
    def wanted(self) -> bool:
        """Whether its fragment is still under way, and has not started over."""
        return self.epoch == self.run.epoch and self.stage in self.run.nodes


@dataclass(frozen=True)
class Flight:
    """A call at work, on `rows` rows from `start` on, since `began` by the monotonic clock."""

    worker: Worker
    item: Item
    start: int
    rows: int
    began: float


class Dispatch:
    """Makes work of the items of lanes.

    Args:
        requests: Makes work for a worker.
        pacing: Tells how many rows it gets.
        workers: How many workers a map has.
    """

    def __init__(self, requests: Requests, pacing: Pacing, workers: Callable[[str], int]) -> None:
        self._requests, self._pacing, self._workers = requests, pacing, workers

    def work(
        self, item: Item, lane: Lane, worker: Worker, last: bool
    ) -> tuple[Work, list[Any], int, int]:
        """Takes work from a lane's first item; the item leaves the lane with its last rows.

        Args:
            item: The item.
            lane: Its lane.
            worker: Who will do it.
            last: Whether nothing else will wait in the lane.

        Returns:
            The work, the tables that it needs, and the rows that it is about.
        """
        run, node = item.run, item.run.nodes[item.stage]
        if item.again is not None:
            lane.pop()
            return self._again(run, node, worker.name, item.again)
        if item.kind == "slice":
            spec, last = node.spec, last and len(lane) == 1
            assert spec.runs_udf
            wanted = self._pacing.slice_rows(spec, node.rows_left, lane.size, last)
            start, stop = node.take(lane.place(worker), lambda most: min(wanted, most))
            node.flying += 1
            if not node.rows_left:
                lane.pop()
            work, tables = self._requests.slice(run, node, worker.name, start, stop)
            return work, tables, start, stop - start
        lane.pop()
        if item.kind == "load":
            return *self._requests.load(run, node, worker.name, self._workers(item.stage)), 0, 0
        make = self._requests.gather if item.kind == "gather" else self._requests.whole
        return *make(run, node, worker.name), 0, 0

    def _again(
        self, run: FragmentRun, node: Node, worker: str, again: Again
    ) -> tuple[Work, list[Any], int, int]:
        start, rows = again.start, again.rows
        if again.error is None:
            work, tables = self._requests.slice(run, node, worker, start, start + rows)
        else:
            ended = run.losses[node.spec.name, start]
            told = f"ended {ended} workers, each of which had no other row at work"
            if again.error == TIMED_OUT:
                told = f"took longer than timeout_s={node.spec.timeout_s:g}, and so {told}"
            told += f"; the last one: {again.why}" if again.why else ""
            work, tables = self._requests.reject(run, node, worker, start, again.error, told)
        return work, tables, start, rows
