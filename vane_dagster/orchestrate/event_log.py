"""What Dagster's event log knows of an asset, by partition."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

DATA_VERSION = "dagster/data_version"
_ASKED_BY_NAME = 1000


class EventLog:
    """Reads the latest events of assets; a None partition is an unpartitioned asset's."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance
        self._storage = instance.event_log_storage

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
