"""What an event says of the inputs, from which Dagster tells later whether it is stale.

Dagster writes this itself for what a step yields. But it would give all partitions of a run one
data version, and read the inputs' versions before the step has seen what they hold, so the events
are logged by hand, with these tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dagster as dg

from vane_dagster.orchestration.event_log import EventLog

_UNKNOWN = "INITIAL"  # Dagster's version of what has no event
_NO_EVENT = "NULL"


class _Input:
    """An asset that the step reads and does not write, as it was when the step began."""

    def __init__(self, key: dg.AssetKey, log: EventLog, partitions: Sequence[str | None]) -> None:
        newest = log.newest(key)
        self.pointers: dict[str | None, int] = {}
        self.versions: dict[str | None, str] = {}
        pointer, version, kind = newest or (_NO_EVENT, None, None)
        self._pointer: int | str = pointer
        self._version = version or _UNKNOWN
        if kind is not None and version is None:
            self.versions |= log.versions(key, kind, partitions)

    def at(self, partition: str | None) -> tuple[str, str]:
        """Event pointer and data version; of partitions any later event serves as pointer."""
        pointer = self.pointers.get(partition, self._pointer)
        return str(pointer), self.versions.get(partition, self._version)


class Provenance:
    """Reads the inputs' events when it is made, so make it before the inputs are read.

    Args:
        context: The step's.
        partitions: Keys of the run; ``[None]`` for an unpartitioned pipeline.
    """

    def __init__(self, context: dg.AssetExecutionContext, partitions: Sequence[str | None]) -> None:
        self._log = EventLog(context.instance)
        self._inside = context.selected_asset_keys
        self._deps = {
            spec.key: tuple(dep.asset_key for dep in spec.deps)
            for spec in context.assets_def.specs
            if spec.key in self._inside
        }
        outside = {dep for deps in self._deps.values() for dep in deps} - self._inside
        self._outside = {key: _Input(key, self._log, partitions) for key in outside}
        self._written: dict[tuple[dg.AssetKey, str | None], int] = {}

    def written(self, key: dg.AssetKey, pointers: Mapping[str | None, int]) -> None:
        """Take in storage ids of materializations that the step has written."""
        self._written |= {(key, partition): pointer for partition, pointer in pointers.items()}

    def look_up(self, key: dg.AssetKey, partitions: Sequence[str | None], log: EventLog) -> None:
        """Read what `tags` needs for these partitions and the step has not written itself."""
        for dep in self._inside.intersection(self._deps[key]):
            if missing := [p for p in partitions if (dep, p) not in self._written]:
                self.written(dep, log.materialized(dep, missing))

    def observed(self, key: dg.AssetKey, partitions: Sequence[str | None]) -> None:
        """Takes in that the step has logged observations of an input."""
        found = self._log.pointers(key, dg.DagsterEventType.ASSET_OBSERVATION, partitions)
        versions = self._log.versions(key, dg.DagsterEventType.ASSET_OBSERVATION, partitions)
        for partition in partitions:
            self._outside[key].pointers[partition] = found[partition]
            self._outside[key].versions[partition] = versions[partition]

    def tags(
        self, key: dg.AssetKey, partition: str | None, versions: Mapping[dg.AssetKey, str]
    ) -> dict[str, str]:
        """Tags for the event of an asset's partition.

        Args:
            key: The asset. The events of what it reads inside the step are logged already.
            partition: Its partition, which `look_up` was called for.
            versions: Data versions of inputs, where they are known better than by their events.
        """
        found = {}
        for dep in self._deps[key]:
            if dep in self._inside:
                pointer, version = str(self._written.get((dep, partition), _NO_EVENT)), _UNKNOWN
            else:
                pointer, version = self._outside[dep].at(partition)
            name = dep.to_user_string()
            found[f"dagster/input_event_pointer/{name}"] = pointer
            found[f"dagster/input_data_version/{name}"] = versions.get(dep, version)
        return found
