"""Dead workers, rows that kill workers, and damaged parts.

Rows that kill workers are isolated by bisection on fresh workers. Damaged parts are removed and
computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from vane_dagster.compute.api import Worker
from vane_dagster.engine.fragment_state import FragmentState
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import DamagedPartError, StoreError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.planning.plan import Part
from vane_dagster.worker.protocol import Fault
from vane_dagster.worker.retry import TIMED_OUT, WORKER_DIED, RowLoss

_MAX_LOSSES_PER_ROW = 2
_MAX_CONSECUTIVE_DEATHS = 16
MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive fragments at which a worker fails before it is considered faulty."""


@dataclass(frozen=True)
class WorkerLoss:
    """A call that returned no rows, with no evidence against its rows.

    Attributes:
        reason: Description of the event.
        worker: Whether the worker itself must be replaced.
        fault: The worker's fault, if its model died and it could report one.
        rows_cleared: Whether the rows cannot be the cause.
        timed_out: Whether a deadline ended the worker; None if unknown.
    """

    reason: str
    worker: bool
    fault: Fault | None = None
    rows_cleared: bool = False
    timed_out: bool | None = None

    def exceeded(self, spec: StageSpec, seconds: float) -> float | None:
        """Return the `timeout_s` that a call exceeded; None if it did not."""
        limit = spec.failures.timeout_s
        if limit is None or self.fault is not None:
            return None
        hung = seconds >= limit if self.timed_out is None else self.timed_out
        return limit if hung else None


@dataclass(frozen=True)
class Retry:
    """Rows of a fragment to retry, or a row to reject.

    Attributes:
        start: The first row.
        rows: Number of rows.
        error: Error of a rejected row; None to retry.
        why: Last message of its worker, if any.
    """

    start: int
    rows: int
    error: RowLoss | None = None
    why: str = ""


class WorkerLosses:
    """Tracks which calls a lost worker was executing, and decides about their rows."""

    def __init__(self) -> None:
        self._executing: dict[Worker, set[int]] = {}
        self._consecutive_deaths: dict[str, int] = {}

    def record_loss(self, worker: Worker, tickets: Collection[int], at_once: int) -> None:
        """Record the calls that a lost worker was executing; only the first lost call counts."""
        self._executing.setdefault(worker, set(sorted(tickets)[:at_once]))

    def was_executing(self, worker: Worker, ticket: int) -> bool:
        """Whether a lost worker was executing a call, as opposed to having it queued."""
        return ticket in self._executing[worker]

    def record_death(self, run: FragmentState, spec: StageSpec, start: int, rows: int) -> None:
        """Count a worker death on rows of a fragment."""
        self._consecutive_deaths[spec.name] = self._consecutive_deaths.get(spec.name, 0) + 1
        if rows == 1:
            key = (spec.name, start)
            run.losses[key] = run.losses.get(key, 0) + 1

    def answered(self, stage: str) -> None:
        """Record that a call of a stage completed."""
        self._consecutive_deaths[stage] = 0

    def is_crash_looping(self, stage: str) -> bool:
        """Whether a stage's workers die regardless of their input."""
        return self._consecutive_deaths.get(stage, 0) > _MAX_CONSECUTIVE_DEATHS

    def plan_retries(
        self,
        run: FragmentState,
        spec: StageSpec,
        start: int,
        rows: int,
        was_executing_rows: bool,
        hung: bool,
        why: str = "",
    ) -> list[Retry]:
        """Decide what to do with the rows of a lost call, after `record_death` has counted it."""
        if not was_executing_rows:
            return [Retry(start, rows)]
        if rows > 1:
            half = rows // 2
            return [Retry(start, half), Retry(start + half, rows - half)]
        if run.losses.get((spec.name, start), 0) < _MAX_LOSSES_PER_ROW:
            return [Retry(start, 1)]
        return [Retry(start, 1, TIMED_OUT if hung else WORKER_DIED, why)]


class FailureStreak:
    """Consecutive failures of a worker at different fragments: a live worker may have a dead model.

    A fresh worker then replaces it. If the fresh one fails in the same way from its first call on,
    the cause is in the code or the rows, and none is replaced until a call succeeds.
    """

    def __init__(self) -> None:
        self._failed: dict[Worker, set[int]] = {}
        self._replaced_in_vain: set[str] = set()

    def record_success(self, worker: Worker) -> None:
        """Record that a call of a worker returned rows."""
        self._failed.pop(worker, None)
        self._replaced_in_vain.discard(worker.pool)

    def record_failure(self, worker: Worker, run: FragmentState) -> None:
        """Record that a call of a worker returned no rows."""
        self._failed.setdefault(worker, set()).add(run.order)

    def should_replace(self, worker: Worker) -> bool:
        """Whether a worker has so many consecutive failures that a fresh one may do better."""
        failed = self._failed.get(worker, ())
        return len(failed) >= MAX_CONSECUTIVE_FAILURES and worker.pool not in self._replaced_in_vain

    def record_replacement(self, worker: Worker) -> None:
        """Record a replacement, which counts as useless until a call returns rows."""
        self._replaced_in_vain.add(worker.pool)


MAX_PASSES = 4
"""Maximum number of passes of a run over its partitions because of damaged parts."""


class PartRepair:
    """Removes damaged parts that workers encounter in one pass; the last pass repairs nothing.

    A fragment that reads a damaged part stops for this pass over the plan. After all other work,
    its partition is planned again, and the plan then has the part as missing. A part of a stage
    that was not selected is left in place, and an error names its stage.
    """

    def __init__(self, state: RunState, last: bool) -> None:
        self._state, self._last = state, last

    def remove_damaged(self, run: FragmentState, stage: str, fault: Fault) -> VaneError | None:
        """Remove the damaged part that a fault names, and suspend the fragment."""
        owner, part = self._owner(run, fault.part)
        if owner is None or part is None:
            return fault.error()
        return self._remove((run.partition, run.index), owner, part, stage, fault)

    def remove_copied(self, partition: int, stage: str, fault: Fault) -> VaneError | None:
        """Remove a damaged part from which rows would be copied, if it is among the results.

        If its row records are damaged, it stays without them.
        """
        parts = self._state.parts[partition, stage]
        for index, part in parts.items():
            if fault.part == part.info.row_records:
                parts[index] = replace(part, info=replace(part.info, row_records=""))
                return None
            if fault.part in part.info.files:
                return self._remove((partition, index), stage, part, stage, fault)
        return None

    def _remove(
        self, fragment: tuple[int, int], owner: str, part: Part, stage: str, fault: Fault
    ) -> VaneError | None:
        error, partition = fault.error(), self._state.plan.partitions[fragment[0]]
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
        self._state.parts[fragment[0], owner].pop(fragment[1], None)
        if self._last:
            return StoreError(
                f"{fault.message}. It belongs to {whose}, and was removed after others of the run. "
                "Check the storage, and run again: it is computed again"
            )
        self._state.damaged[fragment] = error
        self._state.emit(
            Noticed(f"{fault.message}. It belongs to {whose}; it was removed, to be computed again")
        )
        return None

    def _owner(self, run: FragmentState, name: str) -> tuple[str | None, Part | None]:
        """The stage that a part belongs to, and the part."""
        for stage, part in run.row_retries.items():
            if part.info.name == name:
                return stage, part
        for (partition, stage), parts in self._state.parts.items():
            held = parts.get(run.index) if partition == run.partition else None
            if held is not None and held.info.name == name:
                return stage, held
        return None, None


def partitions_to_replan(state: RunState) -> Sequence[str | None]:
    """The partitions with removed parts, and those that wait for one of them.

    If another stage of such a partition failed, its unfinished stages fail instead.
    """
    if not state.damaged:
        return []
    again = []
    error = next(iter(state.damaged.values()))
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
