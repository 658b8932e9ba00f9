"""Dagster's latest events of an asset, and the events that a step logs.

Dagster compares the input versions in an event's tags to decide whether the asset is stale. It
writes these tags itself for results that a step yields. But it gives all partitions of a run one
data version, and it reads the input versions before the step has seen the inputs. Therefore this
package logs its events with its own tags, by `context.log_event`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

from vane_dagster.errors import VaneError, names
from vane_dagster.orchestration.signals import signals_deferred

Target = AssetCheckEvaluationTargetMaterializationData
"""A check evaluation's reference to a materialization."""

DATA_VERSION = "dagster/data_version"
SUMMARY, FIGURES = "summary", "bottleneck"
"""The entries of the metadata of a step's last event that sum the step up: a text, and JSON."""
_ASKED_BY_NAME = 1000
_LATEST_RUNS = 1000
_MADE = dg.DagsterEventType.ASSET_MATERIALIZATION


class EventLog:
    """Reads the latest events of assets; partition None means an unpartitioned asset."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance
        self._storage = instance.event_log_storage

    def versions(
        self, key: dg.AssetKey, kind: dg.DagsterEventType, partitions: Sequence[str | None]
    ) -> dict[str | None, str]:
        """Return the data versions of the partitions that have one."""
        keys = [key for key in partitions if key is not None]
        if not keys:
            newest = self.newest(key)
            return {None: newest[1]} if newest and newest[1] else {}
        tags = self._storage.get_latest_tags_by_partition(
            key,
            kind,
            [DATA_VERSION],
            asset_partitions=keys if len(keys) <= _ASKED_BY_NAME else None,
        )
        wanted = set(keys)
        return {p: t[DATA_VERSION] for p, t in tags.items() if p in wanted and DATA_VERSION in t}

    def pointers(
        self, key: dg.AssetKey, partitions: Sequence[str | None], kind: dg.DagsterEventType = _MADE
    ) -> dict[str | None, int]:
        """Return the storage ids of the partitions' latest events of a kind."""
        keys = {key for key in partitions if key is not None}
        if not keys:
            log = self._storage
            fetch = log.fetch_materializations if kind is _MADE else log.fetch_observations
            records = fetch(key, limit=1).records
            return {None: records[0].storage_id} if records else {}
        asked = keys if len(keys) <= _ASKED_BY_NAME else None
        return dict(self._storage.get_latest_storage_id_by_partition(key, kind, asked).items())

    def targets(
        self, key: dg.AssetKey, partitions: Sequence[str | None]
    ) -> dict[str | None, Target]:
        """Return check evaluation targets for the partitions' latest materializations."""
        ids = list(self.pointers(key, partitions).values())
        by_partition = {}
        for start in range(0, len(ids), _ASKED_BY_NAME):
            wanted = ids[start : start + _ASKED_BY_NAME]
            records = self._storage.fetch_materializations(
                dg.AssetRecordsFilter(asset_key=key, storage_ids=wanted), limit=len(wanted)
            ).records
            for record in records:
                assert record.asset_materialization is not None
                by_partition[record.asset_materialization.partition] = Target(
                    storage_id=record.storage_id,
                    run_id=record.run_id,
                    timestamp=record.timestamp,
                )
        return by_partition

    def newest(self, key: dg.AssetKey) -> tuple[int, str | None, dg.DagsterEventType] | None:
        """Return the storage id, the data version and the type of an asset's latest event.

        The data version is None for an event of a partition.
        """
        record = self._instance.get_latest_data_version_record(key)
        if record is None:
            return None
        entry = record.event_log_entry
        event = entry.asset_materialization or entry.asset_observation
        assert event is not None
        assert entry.dagster_event_type is not None
        tags = (event.tags or {}) if event.partition is None else {}
        return record.storage_id, tags.get(DATA_VERSION), entry.dagster_event_type


@contextmanager
def opened_run(run: str) -> Iterator[tuple[dg.DagsterInstance, str]]:
    """Open the instance of a run, and return the run's id.

    Args:
        run: The beginning of the run's id, of the latest runs of the instance of `$DAGSTER_HOME`.
    """
    if not os.environ.get("DAGSTER_HOME"):
        raise VaneError("$DAGSTER_HOME is not set; expected the folder of the instance of the run")
    with dg.DagsterInstance.get() as instance:
        known = [each for each in instance.get_run_ids(limit=_LATEST_RUNS) if each.startswith(run)]
        if len(known) != 1:
            runs = names(known) if known else f"none of the latest {_LATEST_RUNS:,} runs"
            raise VaneError(
                f"run {run!r}: expected the beginning of the id of one run; it matches {runs}"
            )
        yield instance, known[0]


def summaries(run: str) -> dict[str, tuple[str, Any]]:
    """Return the text and the figures, as JSON, that each step of a run ended with.

    Args:
        run: See `opened_run`.
    """
    by_step = {}
    with opened_run(run) as (instance, id):
        kinds = {dg.DagsterEventType.STEP_OUTPUT, dg.DagsterEventType.STEP_FAILURE}
        for entry in instance.all_logs(id, of_type=kinds):
            data: Any = entry.get_dagster_event().event_specific_data
            metadata = getattr(getattr(data, "user_failure_data", data), "metadata", {})
            if SUMMARY in metadata:
                by_step[str(entry.step_key)] = metadata[SUMMARY].value, metadata[FIGURES].value
    return by_step


_UNKNOWN = "INITIAL"  # Dagster's data version for an asset without events
_NO_EVENT = "NULL"


class _Input:
    """An asset that the step reads and does not write, as of the start of the step."""

    def __init__(self, key: dg.AssetKey, log: EventLog, partitions: Sequence[str | None]) -> None:
        self.pointers: dict[str | None, int] = {}
        self.versions: dict[str | None, str] = {}
        self._newest = log.newest(key)
        if self._newest and self._newest[1] is None:
            self.versions = log.versions(key, self._newest[2], partitions)

    def at(self, partition: str | None) -> tuple[str, str]:
        """Return the event pointer and the data version of a partition.

        Any later event is a valid pointer for a partition.
        """
        pointer, version, _ = self._newest or (_NO_EVENT, None, None)
        pointer = self.pointers.get(partition, pointer)
        return str(pointer), self.versions.get(partition, version or _UNKNOWN)


class Provenance:
    """Provenance tags for the events of a step.

    The constructor reads the events of the inputs, so create this object before reading the inputs.
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
        self._above: dict[dg.AssetKey, dict[str | None, int]] = {}

    def look_up(self, key: dg.AssetKey, partitions: Sequence[str | None]) -> None:
        """Read the materializations of the step's other assets that `tags` needs."""
        deps = self._inside.intersection(self._deps[key])
        self._above = {dep: self._log.pointers(dep, partitions) for dep in deps}

    def observed(self, key: dg.AssetKey, partitions: Sequence[str | None]) -> None:
        """Record that the step logged observations of an input."""
        pointers = self._log.pointers(key, partitions, dg.DagsterEventType.ASSET_OBSERVATION)
        versions = self._log.versions(key, dg.DagsterEventType.ASSET_OBSERVATION, partitions)
        self._outside[key].pointers |= pointers
        self._outside[key].versions |= versions

    def tags(
        self, key: dg.AssetKey, partition: str | None, versions: Mapping[dg.AssetKey, str]
    ) -> dict[str, str]:
        """Return the tags for an event of an asset's partition."""
        made = {}
        for dep in self._deps[key]:
            if dep in self._inside:
                pointer, version = str(self._above[dep].get(partition, _NO_EVENT)), _UNKNOWN
            else:
                pointer, version = self._outside[dep].at(partition)
            name = dep.to_user_string()
            made[f"dagster/input_event_pointer/{name}"] = pointer
            made[f"dagster/input_data_version/{name}"] = versions.get(dep, version)
        return made


@contextmanager
def events_grouped(instance: dg.DagsterInstance) -> Iterator[None]:
    """Log the events of this block over one connection for each database of the event log.

    For each event, Dagster opens up to five connections and commits up to four times. So SQLite
    commits a group as a whole. PostgreSQL commits each statement: a long transaction would hide
    events from readers that have seen a later storage id. Signals are deferred until the group is
    written. Without `_connect`, which is private to Dagster, events are logged one by one.
    """
    storage: Any = instance.event_log_storage
    connect = getattr(storage, "_connect", None)
    # The in-memory storage is left as it is: one writer locks it for all other connections.
    is_sql = isinstance(storage, SqlEventLogStorage) and storage.is_persistent
    if connect is None or not is_sql or "_connect" in vars(storage):  # or within a group
        with signals_deferred():
            yield
        return
    owner, former = threading.get_ident(), getattr(storage, "_db_lock", None)
    opened: dict[tuple[str, ...], Any] = {}

    @contextmanager
    def shared(*shard: str) -> Iterator[Any]:
        if threading.get_ident() != owner:
            with connect(*shard) as connection:
                yield connection
            return
        if shard not in opened:
            opened[shard] = exits.enter_context(connect(*shard))
        yield opened[shard]

    with signals_deferred(), ExitStack() as exits:
        # SQLite's lock is not reentrant, and a group has two shards; other threads wait for it.
        storage._connect, storage._db_lock = shared, threading.RLock()
        storage.has_table = functools.cache(storage.has_table)  # each event asks it, and connects
        try:
            # opened first, so committed last: an event is in its run before it is in its asset
            with storage.index_connection():
                yield
        finally:
            del storage._connect, storage.has_table
            storage._db_lock = former


def drop_planned_checks(context: dg.AssetExecutionContext) -> None:
    """Delete the planned evaluations of the step's checks, also those of other runs.

    The status of a check in a partition is its newest row in Dagster's table. Rows are inserted as
    planned when a run is created, so the row of a killed run, or of one created later, would hide
    an evaluation. Without a planned row, Dagster inserts one when an evaluation is logged. Event
    logs that are not SQL databases keep their planned rows.
    """
    storage = context.instance.event_log_storage
    if not isinstance(storage, SqlEventLogStorage):
        return
    row = AssetCheckExecutionsTable.c
    planned = AssetCheckExecutionsTable.delete().where(
        row.execution_status == AssetCheckExecutionRecordStatus.PLANNED.value,
        row.materialization_event_storage_id.is_(None),  # of all planned ones; it has an index
    )
    with storage.index_connection() as connection:
        for key in context.selected_asset_check_keys:
            own = row.asset_key == key.asset_key.to_string(), row.check_name == key.name
            connection.execute(planned.where(*own))
