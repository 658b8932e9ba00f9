"""Workers that died, and the rows that killed them, found by halving on fresh workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from vane_dagster.compute.api import Worker
from vane_dagster.engine.fragment_state import FragmentRun
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.worker.protocol import Fault
from vane_dagster.worker.retry import TIMED_OUT, WORKER_DIED, RowLoss

_MOST_LOSSES_OF_A_ROW = 2
_MOST_DEATHS_IN_A_ROW = 16
FAILURES_IN_A_ROW = 3
"""Fragments that a worker fails at, one after the other, before it is taken to be sick."""


@dataclass(frozen=True)
class Loss:
    """A call of which no rows come back, though nothing is known against them.

    Attributes:
        reason: What happened.
        worker: Whether the worker itself has to be replaced.
        fault: What it said, where its model is dead and it could.
        innocent: Whether the rows cannot be the reason.
        timed_out: Whether a deadline ended the worker; None where that is not known.
    """

    reason: str
    worker: bool
    fault: Fault | None = None
    innocent: bool = False
    timed_out: bool | None = None

    def exceeded(self, spec: StageSpec, seconds: float) -> float | None:
        """The `timeout_s` that a call took longer than; None if it did not.

        Args:
            spec: Its stage.
            seconds: Since when it was under way, which decides where nothing else is known.
        """
        limit = spec.timeout_s
        if limit is None or self.fault is not None:
            return None
        hung = seconds >= limit if self.timed_out is None else self.timed_out
        return limit if hung else None


@dataclass(frozen=True)
class Again:
    """Rows of a fragment that are given out again, or a row that is given up.

    Attributes:
        start: The first row.
        rows: How many.
        error: What the row is at fault of; None to try again.
        why: What its last worker said of it, if anything.
    """

    start: int
    rows: int
    error: RowLoss | None = None
    why: str = ""


class Losses:
    """Which calls a dead worker was at, and what is to be done with their rows."""

    def __init__(self) -> None:
        self._at_work: dict[Worker, set[int]] = {}
        self._deaths: dict[str, int] = {}

    def was_at_work(
        self, worker: Worker, ticket: int, queued: Collection[int], at_once: int
    ) -> bool:
        """Whether a lost worker was at a call, and did not only have it queued: the oldest were.

        Args:
            worker: The worker.
            ticket: The call.
            queued: Tickets of its other calls.
            at_once: Calls that it does at the same time.
        """
        if worker not in self._at_work:
            self._at_work[worker] = set(sorted([ticket, *queued])[:at_once])
        return ticket in self._at_work[worker]

    def answered(self, stage: str) -> None:
        """Takes note that a call of a stage came back."""
        self._deaths[stage] = 0

    def is_sick(self, stage: str) -> bool:
        """Whether a stage's workers die whatever they are given."""
        return self._deaths.get(stage, 0) > _MOST_DEATHS_IN_A_ROW

    def again(
        self,
        run: FragmentRun,
        spec: StageSpec,
        start: int,
        rows: int,
        guilty: bool,
        hung: bool,
        why: str = "",
    ) -> list[Again]:
        """What is to be done with the rows of a lost call.

        Args:
            run: Their fragment.
            spec: Their stage.
            start: The first of them.
            rows: How many there are.
            guilty: Whether the worker was at them.
            hung: Whether it took longer than `timeout_s`.
            why: What the worker said, if it could.
        """
        if not guilty:
            return [Again(start, rows)]
        self._deaths[spec.name] = self._deaths.get(spec.name, 0) + 1
        if rows > 1:
            half = rows // 2
            return [Again(start, half), Again(start + half, rows - half)]
        key = (spec.name, start)
        run.losses[key] = run.losses.get(key, 0) + 1
        if run.losses[key] < _MOST_LOSSES_OF_A_ROW:
            return [Again(start, 1)]
        return [Again(start, 1, TIMED_OUT if hung else WORKER_DIED, why)]


class Streaks:
    """Failures of a worker in a row, at different fragments: its model may be dead while it lives.

    A fresh worker then takes its place. Where that one fails in the same way from its first call
    on, the reason is in the code or the rows, and none is replaced until a call succeeds.
    """

    def __init__(self) -> None:
        self._failed: dict[Worker, set[int]] = {}
        self._in_vain: set[str] = set()

    def succeeded(self, worker: Worker) -> None:
        """Takes note that a call of a worker gave rows."""
        self._failed.pop(worker, None)
        self._in_vain.discard(worker.pool)

    def failed(self, worker: Worker, run: FragmentRun) -> bool:
        """Takes note that a call did not; tells whether the worker is to be replaced."""
        row = self._failed.setdefault(worker, set())
        row.add(run.order)
        if len(row) < FAILURES_IN_A_ROW or worker.pool in self._in_vain:
            return False
        self._in_vain.add(worker.pool)
        return True
