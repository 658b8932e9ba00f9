"""Damaged parts, which are removed, so that the next run computes them again.

A fragment that reads one stops. When all other work is done, its partition fails.
"""

from __future__ import annotations

from dataclasses import replace

from vane_dagster.engine.fragment_state import FragmentState
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import StoreError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.planning.plan import Part
from vane_dagster.worker.reports import Fault


def remove_damaged(state: RunState, run: FragmentState, fault: Fault) -> VaneError | None:
    """Remove the damaged part that a fault names; return an error if that is not possible."""
    for (index, owner), parts in state.parts.items():
        part = parts.get(run.index) if index == run.partition else None
        if part is not None and part.info.name == fault.part:
            return _remove(state, (run.partition, run.index), owner, part, fault)
    return fault.error()


def remove_copied(state: RunState, partition: int, stage: str, fault: Fault) -> VaneError | None:
    """Remove a damaged part from which rows would be copied, if it is among the results.

    If its row records are damaged, it stays without them.
    """
    parts = state.parts[partition, stage]
    for index, part in parts.items():
        if fault.part == part.info.row_records:
            parts[index] = replace(part, info=replace(part.info, row_records=""))
            return None
        if fault.part in part.info.files:
            return _remove(state, (partition, index), stage, part, fault)
    return None


def _remove(
    state: RunState, fragment: tuple[int, int], owner: str, part: Part, fault: Fault
) -> VaneError | None:
    try:
        part.folder.delete([fault.part])
    except StoreError as refused:
        return refused
    partition = state.plan.partitions[fragment[0]]
    where = "" if partition.key is None else f", partition {partition.key!r}"
    text = (
        f"{fault.message}. It was removed from the stage '{state.pipeline.name}/{owner}'{where}. "
        f"Materialize {owner!r} again"
    )
    state.parts[fragment[0], owner].pop(fragment[1], None)
    state.damaged[fragment] = StoreError(text)
    state.emit(Noticed(text))
    return None


def fail_damaged(state: RunState) -> None:
    """Fail the partitions with removed parts."""
    for (index, _), error in state.damaged.items():
        for stage in state.unfinished(index):
            state.fail(index, stage, error)
