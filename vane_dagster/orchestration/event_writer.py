"""Writes a step's asset events to Dagster's event log in batches.

For each event, `context.log_event` opens up to five database connections and commits up to four
times. It also repeats the event in the step's log and stores several times the bytes that are read
later.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Union, cast

import dagster as dg
from dagster._core.events import (
    AssetObservationData,
    DagsterEventBatchMetadata,
    StepMaterializationData,
)
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.event_log import EventLogStorage, SqlEventLogStorage
from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

from vane_dagster.orchestration.event_log import EventLog, Target
from vane_dagster.orchestration.signals import signals_deferred

AssetEvent = Union[dg.AssetMaterialization, dg.AssetObservation, dg.AssetCheckEvaluation]


class EventWriter:
    """Writes asset events in groups, each group over one database connection.

    SQLite commits a group as a whole. Other databases commit each statement, because a long
    transaction would hide events from readers that have seen a later storage id.

    Args:
        context: The context of the step that the events belong to.
    """

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        self._step = context.op_execution_context.get_step_execution_context()
        self._instance = context.instance
        self._run_id = context.run.run_id
        self._storage = with_groups(context.instance.event_log_storage)
        # PostgreSQL compresses rows from 2 KB on, so a shorter event would take more space.
        self._in_full = not self._storage.is_run_sharded
        self._written: list[dg.DagsterEvent] = []
        self.log = EventLog(context.instance, self._storage)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Write the events of this block as one group.

        Signals are deferred until the group is written. Nothing else may be logged in the block:
        on SQLite, another connection would wait for this one.
        """
        with signals_deferred():
            if isinstance(self._storage, _OneConnection):
                with self._storage.group():
                    yield
            else:
                yield

    def write(self, events: Sequence[AssetEvent]) -> float:
        """Write events of one type and one asset.

        Returns:
            The timestamp of the events.
        """
        now = time.time()
        entries = [self._entry(event, now) for event in events]
        # Dagster does not support batches of evaluations.
        batched = not isinstance(events[0], dg.AssetCheckEvaluation)
        if not isinstance(self._storage, _OneConnection):
            batch = str(uuid.uuid4())
            for entry in entries:
                last = DagsterEventBatchMetadata(batch, is_end=entry is entries[-1])
                self._instance.handle_new_event(entry, batch_metadata=last if batched else None)
        elif batched:
            self._storage.store_event_batch(entries)
        else:
            for entry in entries:
                self._storage.store_event(entry)
        return now

    def materialize(self, events: Sequence[dg.AssetMaterialization]) -> Mapping[str | None, Target]:
        """Write materializations of one asset.

        Returns:
            For each partition, the target for its check evaluations.
        """
        now = self.write(events)
        ids = self.log.materialized(events[0].asset_key, [event.partition for event in events])
        return {
            partition: Target(storage_id=id, run_id=self._run_id, timestamp=now)
            for partition, id in ids.items()
        }

    def take(self) -> Iterator[dg.DagsterEvent]:
        """Return the events written since the last call, for the step to yield.

        Dagster does not store a yielded `DagsterEvent` again. It is part of the result of
        `dg.materialize`.
        """
        written, self._written = self._written, []
        yield from written

    def _entry(self, event: AssetEvent, timestamp: float) -> dg.EventLogEntry:
        kind, data, message = _content(event)
        step = self._step.step
        made = dg.DagsterEvent(
            event_type_value=kind.value,
            job_name=self._step.job_name,
            step_handle=step.handle,
            node_handle=step.node_handle,
            step_kind_value=step.kind.value,
            logging_tags=self._step.event_tags,
            event_specific_data=data,
            message=message,
            pid=os.getpid(),
        )
        self._written.append(made)
        entry: Any = dg.EventLogEntry  # the constructor has no annotations
        stored: dg.EventLogEntry = entry(
            error_info=None,
            level=logging.DEBUG,
            user_message=message if self._in_full else "",
            run_id=self._run_id,
            timestamp=timestamp,
            step_key=made.step_key,
            job_name=made.job_name,
            dagster_event=made if self._in_full else _without_repetitions(made),
        )
        return stored


def _without_repetitions(event: dg.DagsterEvent) -> dg.DagsterEvent:
    """Return an event without the data that its step key and its run already imply."""
    data = event.event_specific_data
    passed = isinstance(data, dg.AssetCheckEvaluation) and data.passed
    message = None if passed else event.message
    return event._replace(
        step_handle=None, node_handle=None, step_kind_value=None, logging_tags={}, message=message
    )


def _content(event: AssetEvent) -> tuple[dg.DagsterEventType, Any, str]:
    """Return the type, data and message of Dagster's event for an asset event."""
    if isinstance(event, dg.AssetMaterialization):
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        return kind, StepMaterializationData(event), "Materialized value."
    if isinstance(event, dg.AssetObservation):
        return dg.DagsterEventType.ASSET_OBSERVATION, AssetObservationData(event), ""
    verdict = "passed" if event.passed else "did not pass"
    check = f"Asset check '{event.check_name}' on '{event.asset_key.to_user_string()}'"
    message = f"{check} {verdict}. Description: '{event.description}'"
    return dg.DagsterEventType.ASSET_CHECK_EVALUATION, event, message


@contextmanager
def planned_checks_dropped(context: dg.AssetExecutionContext) -> Iterator[None]:
    """If the step fails, delete its planned check evaluations that did not take place.

    Dagster counts these as failed, and then shows a check that passed in all other partitions as
    failed. Event logs that are not SQL databases keep them.

    Args:
        context: The context of the step.
    """
    try:
        yield
    except Exception:
        storage = context.instance.event_log_storage
        if isinstance(storage, SqlEventLogStorage):
            row = AssetCheckExecutionsTable.c
            planned = AssetCheckExecutionsTable.delete().where(
                row.run_id == context.run.run_id,
                row.execution_status == AssetCheckExecutionRecordStatus.PLANNED.value,
            )
            with storage.index_connection() as connection:
                for key in context.selected_asset_check_keys:
                    own = row.asset_key == key.asset_key.to_string(), row.check_name == key.name
                    connection.execute(planned.where(*own))
        raise


class _OneConnection:
    """Mixin that makes a SQL event log storage use one connection for each shard in a group."""

    _opened: dict[Any, Any] | None = None
    _exits: ExitStack
    _tables: dict[str, bool]

    @contextmanager
    def group(self) -> Iterator[None]:
        """Keep connections open and transactions uncommitted until the end of the block."""
        with ExitStack() as self._exits:
            self._opened = {}
            try:
                # opened first, so committed last: an event is in its run before it is in its asset
                with self.index_connection():  # type: ignore[attr-defined]  # a mixin
                    yield
            finally:
                self._opened = None

    @contextmanager
    def _connect(self, *shard: str) -> Iterator[Any]:
        connect = super()._connect  # type: ignore[misc]  # a mixin
        if self._opened is None:
            with connect(*shard) as connection:
                yield connection
            return
        if shard not in self._opened:
            self._opened[shard] = self._exits.enter_context(connect(*shard))
        yield self._opened[shard]

    def has_table(self, table_name: str) -> bool:
        """Look up a table once. Every event asks for the same one, over a new connection."""
        if table_name not in self._tables:
            self._tables[table_name] = super().has_table(table_name)  # type: ignore[misc]  # mixin
        return self._tables[table_name]


def with_groups(storage: EventLogStorage) -> EventLogStorage:
    """Return a copy of a SQL storage that can write groups; return any other storage unchanged.

    The in-memory storage is unchanged too: one writer locks its tables for all other connections.
    """
    kind = type(storage)
    if not (isinstance(storage, SqlEventLogStorage) and storage.is_persistent):
        return storage
    if not hasattr(kind, "_connect"):
        return storage
    made: Any = type(f"Grouped{kind.__name__}", (_OneConnection, kind), {})
    grouped = made.__new__(made)
    vars(grouped).update(vars(storage), _tables={})
    grouped._db_lock = threading.RLock()  # SQLite's is not reentrant, and a group has two shards
    return cast(EventLogStorage, grouped)
