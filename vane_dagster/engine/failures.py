"""Workers that died, the rows that killed them, and parts that are damaged.

Rows that kill workers are found by halving on fresh workers. A damaged part is removed, to be
computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vane_dagster.compute.api import Worker
from vane_dagster.engine.fragment_state import FragmentRun
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import DamagedPartError, StoreError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.planning.plan import Part
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

    def record_loss(self, worker: Worker, tickets: Collection[int], at_once: int) -> None:
        """Keeps which calls a lost worker was at, the first time that one of its calls is lost.

        Args:
            worker: The worker.
            tickets: Its calls that have not been answered; it was at the oldest.
            at_once: Calls that it does at the same time.
        """
        self._at_work.setdefault(worker, set(sorted(tickets)[:at_once]))

    def was_at_work(self, worker: Worker, ticket: int) -> bool:
        """Whether a lost worker was at a call, and did not only have it queued."""
        return ticket in self._at_work[worker]

    def record_death(self, run: FragmentRun, spec: StageSpec, start: int, rows: int) -> None:
        """Counts a worker that died at rows of a fragment, from `start` on."""
        self._deaths[spec.name] = self._deaths.get(spec.name, 0) + 1
        if rows == 1:
            key = (spec.name, start)
            run.losses[key] = run.losses.get(key, 0) + 1

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
        """What is to be done with the rows of a lost call, once `record_death` has counted it.

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
        if rows > 1:
            half = rows // 2
            return [Again(start, half), Again(start + half, rows - half)]
        if run.losses.get((spec.name, start), 0) < _MOST_LOSSES_OF_A_ROW:
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

    def record_success(self, worker: Worker) -> None:
        """Takes note that a call of a worker gave rows."""
        self._failed.pop(worker, None)
        self._in_vain.discard(worker.pool)

    def record_failure(self, worker: Worker, run: FragmentRun) -> None:
        """Takes note that a call of a worker gave no rows."""
        self._failed.setdefault(worker, set()).add(run.order)

    def should_replace(self, worker: Worker) -> bool:
        """Whether a worker has failed so often in a row that a fresh one may do better."""
        failed = self._failed.get(worker, ())
        return len(failed) >= FAILURES_IN_A_ROW and worker.pool not in self._in_vain

    def record_replacement(self, worker: Worker) -> None:
        """Takes note that a worker is replaced, which is in vain until a call gives rows."""
        self._in_vain.add(worker.pool)


MOST_PASSES = 4
"""How often a run goes over its partitions at most, because parts were damaged."""


class Mending:
    """Deals with the damaged parts that workers meet in one pass; the last one mends nothing.

    A fragment that reads a damaged part goes no further in this pass over the plan. When everything
    else is done, its partition is planned again, which finds the part missing. A part of a stage
    that the run was not asked for is left as it is, and an error names its stage.
    """

    def __init__(self, state: RunState, last: bool) -> None:
        self._state, self._last = state, last

    def remove_damaged(self, run: FragmentRun, stage: str, fault: Fault) -> VaneError | None:
        """Removes the damaged part that a fault names, and sets the fragment aside.

        Args:
            run: The fragment.
            stage: The stage that read the part.
            fault: What the worker said.

        Returns:
            The error of the fault where the part cannot be made again in this run.
        """
        error = fault.error()
        if not fault.part:
            return error
        partition = self._state.plan.partitions[run.partition]
        owner, part = self._owner(run, fault.part)
        if owner is None or part is None:
            return error
        whose = f"the stage '{self._state.pipeline.name}/{owner}'"
        if partition.key is not None:
            whose += f", partition {partition.key!r}"
        if owner not in partition.stages:
            return StoreError(
                f"{fault.message}. It belongs to {whose}, which is not selected: select {owner!r} "
                f"together with {stage!r}, and it is computed again, or materialize {owner!r} with "
                "force"
            )
        try:
            part.folder.delete([fault.part])
        except StoreError as refused:
            return refused
        self._state.parts[run.partition, owner].pop(run.index, None)
        if self._last:
            return StoreError(
                f"{fault.message}. It belongs to {whose}, and was removed after others of the run. "
                "Check the storage, and run again: it is computed again"
            )
        self._state.aside[run.partition, run.index] = error
        self._state.emit(
            Noticed(f"{fault.message}. It belongs to {whose}; it was removed, to be computed again")
        )
        return None

    def _owner(self, run: FragmentRun, name: str) -> tuple[str | None, Part | None]:
        """The stage that a part belongs to, and the part."""
        for stage, part in run.mends.items():
            if part.info.name == name:
                return stage, part
        for (partition, stage), parts in self._state.parts.items():
            held = parts.get(run.index) if partition == run.partition else None
            if held is not None and held.info.name == name:
                return stage, held
        return None, None


def to_plan_again(state: RunState) -> Sequence[str | None]:
    """The partitions of which parts were removed, and those that wait for one of them.

    Where something failed too, they fail.
    """
    if not state.aside:
        return []
    again = []
    error = next(iter(state.aside.values()))
    for index, partition in enumerate(state.plan.partitions):
        unfinished = state.unfinished(index)
        if not unfinished:
            continue
        if not any(failed == index for failed, _ in state.failed):
            again.append(partition.key)
            continue
        for stage in unfinished:
            state.fail(index, stage, DamagedPartError(f"{error}. Run again"))
    return again
