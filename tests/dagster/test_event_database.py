"""What a run writes to Dagster's database: how many times, and in groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dagster as dg
import pytest
import sqlalchemy
from dagster._core.storage.event_log import SqlEventLogStorage, SqliteEventLogStorage
from sqlalchemy.engine import Engine

from support.event_world import (  # noqa: F401  # fixtures
    KEYS,
    World,
    database,
    embed,
    instance,
    one_group,
    world,
)
from vane_dagster.orchestration import reporting
from vane_dagster.orchestration.event_log import events_grouped


def test_connections_and_look_ups_do_not_grow_with_partitions(
    world, instance, one_group, monkeypatch
):
    keys = KEYS[:6]
    assert world.run(instance, *keys).success
    look_up = SqlEventLogStorage.get_latest_storage_id_by_partition
    looked_up: Counter[str] = Counter()
    monkeypatch.setattr(
        SqlEventLogStorage,
        "get_latest_storage_id_by_partition",
        lambda self, key, *rest, **more: (
            looked_up.update([key.path[-1]]) or look_up(self, key, *rest, **more)
        ),
    )

    count: Counter[str] = Counter()
    flush = reporting.RunReport.flush

    def counted(report: reporting.RunReport) -> None:
        """Without the connections by which Dagster stores what it has planned."""

        def connected(*given: Any) -> None:
            count["connections"] += 1

        sqlalchemy.event.listen(Engine, "engine_connect", connected)
        try:
            flush(report)
        finally:
            sqlalchemy.event.remove(Engine, "engine_connect", connected)

    monkeypatch.setattr(reporting.RunReport, "flush", counted)

    def connections(*keys: str) -> int:
        """Connections of a run that reports what an earlier one has made."""
        count.clear()
        assert world.run(instance, *keys).success
        return count["connections"]

    few = connections(*keys[:2])
    assert looked_up == {"vectors": 1, "labels": 1}
    looked_up.clear()
    many = connections(*keys)
    assert looked_up == {"vectors": 1, "labels": 1}
    assert many == few < 10


def test_a_group_of_logged_events_is_committed_as_a_whole_or_not_at_all(instance):
    """On SQLite; PostgreSQL commits each statement."""
    is_whole = isinstance(instance.event_log_storage, SqliteEventLogStorage)
    storage, made = instance.event_log_storage, dg.AssetKey("made")
    assert callable(storage._connect), "the storage has another base class: groups do not work"

    def indexed(instance: dg.DagsterInstance) -> int:
        return len(instance.fetch_materializations(made, limit=100).records)

    def stored() -> tuple[int, int]:
        """Events in the asset's index, and in the runs' own logs."""
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        runs = [run.run_id for run in instance.get_runs()]
        logs = [instance.all_logs(run, of_type=kind) for run in runs]
        return indexed(instance), sum(map(len, logs))

    partitions = dg.StaticPartitionsDefinition(["a", "b", "c"])

    @dg.multi_asset(specs=[dg.AssetSpec(made)], partitions_def=partitions, can_subset=True)
    def make(context):
        def log(partition: str) -> Any:
            context.log_event(dg.AssetMaterialization(made, partition=partition))

        with dg.DagsterInstance.from_ref(instance.get_ref()) as other, events_grouped(instance):
            log("a")
            log("b")
            assert indexed(other) == (0 if is_whole else 2)
            kind = dg.DagsterEventType.ASSET_MATERIALIZATION
            ids = storage.get_latest_storage_id_by_partition(made, kind, {"a", "b"})
            assert set(ids) == {"a", "b"}, "a group does not see its own events"
        assert stored() == (2, 2)
        with pytest.raises(KeyError), events_grouped(instance):
            log("c") or {}["an error"]
        left = 2 if is_whole else 3
        assert stored() == (left, left), "what a group that failed has left"
        log("c")
        assert stored() == (left + 1, left + 1)
        yield dg.MaterializeResult(asset_key=made, metadata=reporting.LOGGED_ALREADY)

    result = dg.materialize([make], instance=instance, partition_key="a", raise_on_error=True)
    assert len(result.get_asset_materialization_events()) == 4, (
        "events that a step logs are not in its result any more"
    )
