"""Damaged parts, which are removed and computed again in another pass over the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vane_dagster.engine.fragment_state import FragmentState
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import DamagedPartError, StoreError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.planning.plan import Part
from vane_dagster.worker.reports import Fault


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
