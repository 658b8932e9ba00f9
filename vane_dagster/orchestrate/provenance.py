"""What an event says of the inputs, from which Dagster tells later whether it is stale.

Dagster writes this itself for a run of one partition. For several it would give all of them one
data version, so the events are logged by hand, with these tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

_VERSION = "dagster/data_version"
_UNKNOWN = "INITIAL"  # Dagster's version of what has no event
_NO_EVENT = "NULL"


@dataclass(frozen=True)
class _Input:
    """An asset that the step reads and does not write, as it was when the step began."""

    pointer: str
    version: str
    by_partition: Mapping[str, Mapping[str, str]]


class Provenance:
    """Reads the inputs' events when it is made, so make it before the inputs are read.

    Args:
        context: The step's.
        partitions: Keys of the run.
    """

    def __init__(self, context: dg.AssetExecutionContext, partitions: Sequence[str]) -> None:
        self._instance = context.instance
        self._partitions = partitions
        self._inside = context.selected_asset_keys
        self._deps = {
            spec.key: tuple(dep.asset_key for dep in spec.deps)
            for spec in context.assets_def.specs
            if spec.key in self._inside
        }
        outside = {dep for deps in self._deps.values() for dep in deps} - self._inside
        self._outside = {key: self._read(key) for key in outside}

    def tags(
        self, key: dg.AssetKey, partition: str, versions: Mapping[dg.AssetKey, str]
    ) -> dict[str, str]:
        """Tags for the event of an asset's partition.

        Args:
            key: The asset. The events of what it reads inside the step are logged already.
            partition: Its partition.
            versions: Data versions of inputs, where they are known better than by their events.
        """
        found = {}
        for dep in self._deps[key]:
            if dep in self._inside:
                pointer, version = self._latest(dep, partition), _UNKNOWN
            else:
                known = self._outside[dep]
                pointer = known.pointer
                version = known.by_partition.get(partition, {}).get(_VERSION, known.version)
            name = dep.to_user_string()
            found[f"dagster/input_event_pointer/{name}"] = pointer
            found[f"dagster/input_data_version/{name}"] = versions.get(dep, version)
        return found

    def _latest(self, key: dg.AssetKey, partition: str) -> str:
        ids = self._instance.event_log_storage.get_latest_storage_id_by_partition(
            key, dg.DagsterEventType.ASSET_MATERIALIZATION, {partition}
        )
        return str(ids[partition]) if partition in ids else _NO_EVENT

    def _read(self, key: dg.AssetKey) -> _Input:
        record = self._instance.get_latest_data_version_record(key)
        if record is None:
            return _Input(_NO_EVENT, _UNKNOWN, {})
        entry = record.event_log_entry
        event = entry.asset_materialization or entry.asset_observation
        tags = (event.tags if event else None) or {}
        if event is None or event.partition is None:
            return _Input(str(record.storage_id), tags.get(_VERSION, _UNKNOWN), {})
        # Of a partitioned asset any later event than the input's serves as pointer.
        by_partition = self._instance.event_log_storage.get_latest_tags_by_partition(
            key,
            dg.DagsterEventType.ASSET_MATERIALIZATION
            if entry.asset_materialization
            else dg.DagsterEventType.ASSET_OBSERVATION,
            [_VERSION],
            asset_partitions=list(self._partitions),
        )
        return _Input(str(record.storage_id), _UNKNOWN, by_partition)
