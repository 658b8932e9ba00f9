"""Parts that turn out to be damaged while they are read: removed, to be computed again.

The fragment goes no further in this pass over the plan. When everything else is done, its partition
is planned anew, which finds the part missing. A part of a stage that the run was not asked for is
left as it is, and an error tells whose it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from vane_dagster.engine.fragment_state import FragmentRun
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import DamagedPartError, StoreError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.planning.plan import Part
from vane_dagster.worker.protocol import Fault

MOST_PASSES = 4
"""How often a run goes over its partitions at most, because parts were damaged."""


class Mending:
    """Deals with the damaged parts that workers meet in one pass; the last one mends nothing."""

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
