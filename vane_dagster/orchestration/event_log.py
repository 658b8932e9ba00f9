"""What Dagster's event log knows of an asset, by partition."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.storage.event_log import EventLogStorage

Target = AssetCheckEvaluationTargetMaterializationData
"""The reference to a materialization that a check evaluation holds."""

DATA_VERSION = "dagster/data_version"
_ASKED_BY_NAME = 1000


class EventLog:
    """Reads the latest events of assets; a None partition is an unpartitioned asset's.

    Args:
        instance: The Dagster instance.
        storage: Its event log storage, or a copy that has uncommitted events.
    """

    def __init__(
        self, instance: dg.DagsterInstance, storage: EventLogStorage | None = None
    ) -> None:
        self._instance = instance
        self._storage = storage or instance.event_log_storage

    def versions(
        self, key: dg.AssetKey, kind: dg.DagsterEventType, partitions: Sequence[str | None]
    ) -> dict[str | None, str]:
        """The data versions of the partitions that have one."""
        keys = [key for key in partitions if key is not None]
        if not keys:
            found = self._latest(key)
            return {None: found[1]} if found and found[1] else {}
        tags = self._storage.get_latest_tags_by_partition(
            key,
            kind,
            [DATA_VERSION],
            asset_partitions=keys if len(keys) <= _ASKED_BY_NAME else None,
        )
        wanted = set(keys)
        return {p: t[DATA_VERSION] for p, t in tags.items() if p in wanted and DATA_VERSION in t}

    def pointers(
        self, key: dg.AssetKey, kind: dg.DagsterEventType, partitions: Sequence[str | None]
    ) -> dict[str | None, int]:
        """The storage ids of the partitions' latest events."""
        keys = {key for key in partitions if key is not None}
        if not keys:
            found = self._latest(key)
            return {None: found[0]} if found else {}
        asked = keys if len(keys) <= _ASKED_BY_NAME else None
        latest = self._storage.get_latest_storage_id_by_partition(key, kind, asked)
        return dict(latest.items())

    def materialized(
        self, key: dg.AssetKey, partitions: Sequence[str | None]
    ) -> dict[str | None, int]:
        """The storage ids of the partitions' latest materializations."""
        if None not in partitions:
            return self.pointers(key, dg.DagsterEventType.ASSET_MATERIALIZATION, partitions)
        records = self._storage.fetch_materializations(key, limit=1).records
        return {None: records[0].storage_id} if records else {}

    def targets(
        self, key: dg.AssetKey, partitions: Sequence[str | None]
    ) -> dict[str | None, Target]:
        """References to the partitions' latest materializations, as check evaluations hold them."""
        ids = list(self.materialized(key, partitions).values())
        found = {}
        for start in range(0, len(ids), _ASKED_BY_NAME):
            wanted = ids[start : start + _ASKED_BY_NAME]
            records = self._storage.fetch_materializations(
                dg.AssetRecordsFilter(asset_key=key, storage_ids=wanted), limit=len(wanted)
            ).records
            for record in records:
                assert record.asset_materialization is not None
                found[record.asset_materialization.partition] = Target(
                    storage_id=record.storage_id,
                    run_id=record.run_id,
                    timestamp=record.timestamp,
                )
        return found

    def newest(self, key: dg.AssetKey) -> tuple[int, str | None, dg.DagsterEventType] | None:
        """Storage id, data version where it is of no partition, and kind of the latest event."""
        record = self._instance.get_latest_data_version_record(key)
        if record is None:
            return None
        entry = record.event_log_entry
        event = entry.asset_materialization or entry.asset_observation
        assert event is not None
        assert entry.dagster_event_type is not None
        tags = (event.tags or {}) if event.partition is None else {}
        return record.storage_id, tags.get(DATA_VERSION), entry.dagster_event_type

    def _latest(self, key: dg.AssetKey) -> tuple[int, str | None] | None:
        found = self.newest(key)
        return found and found[:2]
