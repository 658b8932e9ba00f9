"""Damaged parts, which are removed, so that the next run computes them again.

A fragment that reads one stops. When all other work is done, its partition fails.
"""

from __future__ import annotations

from collections.abc import Collection

from vane_dagster._texts import in_partition
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import StoreError
from vane_dagster.events import Noticed
from vane_dagster.storage.paths import partition_folder
from vane_dagster.worker.reports import Fault


def remove_damaged(
    state: RunState, partition: int, fault: Fault, looked_up: Collection[str]
) -> int | None:
    """Remove the damaged part of a partition that a fault names; return its fragment's index.

    The part goes first, as no run looks for its companions. Row records in which rows were looked
    up are not removed: their part stays as it is. A branch marks a part of its fallback.
    """
    key = state.plan.partitions[partition].key
    for (index, owner), parts in state.parts.items():
        for fragment, part in parts.items() if index == partition else ():
            spared = part.info.row_records if fault.part in looked_up else ""
            if fault.part in part.info.files and fault.part != spared:
                place = f"stage '{state.pipeline.name}/{owner}'{in_partition(key)}"
                if part.folder.is_read_only:
                    folder = partition_folder(key)
                    state.store.condemn(state.pipeline.name, owner, f"{folder}/{part.info.name}")
                    text = f"It belongs to the fallback store ({place}). Select {owner!r} too"
                else:
                    part.folder.delete([*dict.fromkeys((part.info.name, fault.part))])
                    text = f"It was removed ({place}). Select {owner!r} too, or use force there"
                del parts[fragment]
                state.damaged[partition, fragment] = error = StoreError(f"{fault.message}. {text}")
                state.emit(Noticed(str(error)))
                return fragment
    return None
