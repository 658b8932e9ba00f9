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
_NO_EVENT, _UNKNOWN = "NULL", "INITIAL"
"""Dagster's pointer and data version for an asset without events."""


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
            version = self.newest(key)[1]
            return {None: version} if version else {}
        tags = self._storage.get_latest_tags_by_partition(
            key,
            kind,
            [DATA_VERSION],
            asset_partitions=keys if len(keys) <= _ASKED_BY_NAME else None,
        )
        wanted = set(keys)
        return {p: t[DATA_VERSION] for p, t in tags.items() if p in wanted and DATA_VERSION in t}

    def targets(
        self, key: dg.AssetKey, partitions: Sequence[str | None]
    ) -> dict[str | None, Target]:
        """Return check evaluation targets for the partitions' latest materializations."""
        keys = {key for key in partitions if key is not None}
        if keys:
            asked = keys if len(keys) <= _ASKED_BY_NAME else None
            ids = [*self._storage.get_latest_storage_id_by_partition(key, _MADE, asked).values()]
        else:
            made = self._storage.fetch_materializations(key, limit=1).records
            ids = [record.storage_id for record in made]
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

    def newest(self, key: dg.AssetKey) -> tuple[str, str | None, dg.DagsterEventType]:
        """Return the pointer, the data version and the type of an asset's latest event.

        The data version is None without an event, and for an event of a partition.
        """
        record = self._instance.get_latest_data_version_record(key)
        if record is None:
            return _NO_EVENT, None, _MADE
        entry = record.event_log_entry
        event = entry.asset_materialization or entry.asset_observation
        assert event is not None
        assert entry.dagster_event_type is not None
        tags = (event.tags or {}) if event.partition is None else {}
        return str(record.storage_id), tags.get(DATA_VERSION), entry.dagster_event_type


@contextmanager
def opened_run(run: str) -> Iterator[tuple[dg.DagsterInstance, str]]:
    """Open the instance of `$DAGSTER_HOME`, and return the id of a run by its beginning."""
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
    """Return the text and the figures, as JSON, that each step of a run ended with."""
    by_step = {}
    with opened_run(run) as (instance, id):
        kinds = {dg.DagsterEventType.STEP_OUTPUT, dg.DagsterEventType.STEP_FAILURE}
        for entry in instance.all_logs(id, of_type=kinds):
            data: Any = entry.get_dagster_event().event_specific_data
            metadata = getattr(getattr(data, "user_failure_data", data), "metadata", {})
            if SUMMARY in metadata:
                by_step[str(entry.step_key)] = metadata[SUMMARY].value, metadata[FIGURES].value
    return by_step


class Provenance:
    """Provenance tags for the events of a step.

    The constructor reads the events of the inputs, so create this object before reading the inputs.
    """

    def __init__(self, context: dg.AssetExecutionContext, partitions: Sequence[str | None]) -> None:
        self._log, self._partitions = EventLog(context.instance), partitions
        self._deps = {
            spec.key: tuple(dep.asset_key for dep in spec.deps)
            for spec in context.assets_def.specs
            if spec.key in context.selected_asset_keys
        }
        self._inputs: dict[dg.AssetKey, tuple[str, Mapping[str | None, str], str]] = {}
        for key in {dep for deps in self._deps.values() for dep in deps}:
            self.read(key)

    def read(self, key: dg.AssetKey) -> None:
        """Read the events of an asset that others of the step are made from.

        Any later event of the asset is a valid pointer for each of its partitions.
        """
        pointer, version, kind = self._log.newest(key)
        versions: Mapping[str | None, str] = {}
        if (
            version is None and key not in self._deps
        ):  # manifests name versions of this step's assets
            versions = self._log.versions(key, kind, self._partitions)
        self._inputs[key] = pointer, versions, version or _UNKNOWN

    def tags(
        self, key: dg.AssetKey, partition: str | None, made_from: Mapping[dg.AssetKey, str]
    ) -> dict[str, str]:
        """Return the tags for an event of a partition, made from versions of the step's assets."""
        tags = {}
        for dep in self._deps[key]:
            pointer, versions, version = self._inputs[dep]
            version = made_from.get(dep) or versions.get(partition, version)
            name = dep.to_user_string()
            tags[f"dagster/input_event_pointer/{name}"] = pointer
            tags[f"dagster/input_data_version/{name}"] = version
        return tags


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
