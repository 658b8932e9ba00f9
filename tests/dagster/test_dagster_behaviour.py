"""What we lean on in Dagster and it does not promise, tried on assets that are none of ours.

If one of these fails after an upgrade of Dagster, change `orchestration/reporting.py` and
`orchestration/event_log.py`, even if all other tests pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)

from vane_dagster.orchestration.event_log import DATA_VERSION, events_grouped
from vane_dagster.orchestration.reporting import LOGGED_ALREADY

LETTERS = dg.StaticPartitionsDefinition(["a", "b", "c"])
MADE, BELOW = dg.AssetKey("made"), dg.AssetKey("below")


@pytest.fixture(scope="module")
def database() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as opened:
        yield opened


@pytest.fixture
def instance(database: dg.DagsterInstance) -> dg.DagsterInstance:
    """An empty instance. Wiping one is ten times faster than creating one."""
    database.wipe()
    return database


def across(first: str, last: str) -> dict[str, str]:
    """Tags of a run over a range of partitions."""
    return {
        "dagster/asset_partition_range_start": first,
        "dagster/asset_partition_range_end": last,
    }


def versions(instance: dg.DagsterInstance, key: dg.AssetKey) -> list[tuple[Any, Any]]:
    """Partition and data version of each materialization of an asset, the oldest first."""
    records = instance.fetch_materializations(key, limit=100, ascending=True).records
    events = [record.asset_materialization for record in records]
    return [(e.partition, (e.tags or {}).get(DATA_VERSION)) for e in events if e is not None]


def test_logged_evaluation_counts_where_it_names_the_latest_materialization(instance):
    with pytest.warns(dg.PreviewWarning):
        spec = dg.AssetCheckSpec("check", asset=MADE, partitions_def=LETTERS)
    named = {"a": True, "b": False}

    @dg.multi_asset(
        specs=[dg.AssetSpec(MADE)],
        check_specs=[spec],
        partitions_def=LETTERS,
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
    )
    def make(context):
        for partition in named:
            context.log_event(dg.AssetMaterialization(MADE, partition=partition))
            records = dg.AssetRecordsFilter(asset_key=MADE, asset_partitions=[partition])
            (latest,) = context.instance.fetch_materializations(records, limit=1).records
            target = AssetCheckEvaluationTargetMaterializationData(
                storage_id=latest.storage_id, run_id=latest.run_id, timestamp=latest.timestamp
            )
            context.log_event(
                dg.AssetCheckEvaluation(
                    asset_key=MADE,
                    check_name="check",
                    passed=True,
                    partition=partition,
                    target_materialization_data=target if named[partition] else None,
                )
            )
        yield dg.MaterializeResult(asset_key=MADE, metadata=LOGGED_ALREADY)

    assert dg.materialize([make], instance=instance, tags=across("a", "b")).success

    key = dg.AssetCheckKey(MADE, "check")
    history = instance.event_log_storage.get_asset_check_execution_history(key, 10)
    assert {record.partition: record.status.value for record in history} == {
        "a": "SUCCEEDED",
        "b": "SUCCEEDED",
    }, "evaluations that are logged by hand do not take the place of those planned any more"
    state = instance.event_log_storage.get_asset_check_state([(key, LETTERS)])[key]
    found = {
        status.value: set(subset.value.get_partition_keys())
        for status, subset in state.subsets.items()
        if not subset.is_empty
    }
    assert found == {"SUCCEEDED": {"a"}}, (
        "an evaluation counts for its partition in another way than by its target: the target that "
        "orchestration/check_events.py looks up may be needed no more, or something beside it"
    )


def test_output_of_a_check_counts_as_its_result_and_adds_no_evaluation(instance, caplog):
    check = dg.AssetCheckSpec("check", asset=MADE, blocking=True)

    @dg.multi_asset(specs=[dg.AssetSpec(MADE)], check_specs=[check], can_subset=True)
    def make(context):
        context.log_event(dg.AssetMaterialization(MADE))
        context.log_event(
            dg.AssetCheckEvaluation(
                asset_key=MADE, check_name="check", passed=True, blocking=True, metadata={}
            )
        )
        yield dg.MaterializeResult(asset_key=MADE, metadata=LOGGED_ALREADY)
        if not context.run.tags.get("without"):
            (name,) = context.assets_def.node_check_specs_by_output_name
            yield dg.Output(None, output_name=name)

    @dg.asset(key=BELOW, deps=[MADE])
    def below() -> None: ...

    def warnings_of(**tags: str) -> list[str]:
        caplog.clear()
        result = dg.materialize([make, below], instance=instance, tags=tags)
        assert result.success
        kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
        assert len(instance.all_logs(result.run_id, of_type=kind)) == 1, (
            "an output of a check adds an evaluation to the one that was logged by hand"
        )
        logged = caplog.text + "".join(e.message for e in instance.all_logs(result.run_id))
        texts = ("did not yield or return expected outputs", "emitted no result")
        return [text for text in texts if text in logged]

    assert warnings_of() == [], "an output of a check is not taken for its result any more"
    assert len(warnings_of(without="1")) == 2, (
        "Dagster does not miss the results of checks any more: CheckLog.outputs is not needed"
    )


def test_a_group_of_logged_events_is_committed_as_a_whole_or_not_at_all(instance):
    storage = instance.event_log_storage
    assert callable(storage._connect), "the storage has another base class: groups do not work"

    def stored() -> tuple[int, int]:
        """Events in the asset's index, and in the runs' own logs."""
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        runs = [run.run_id for run in instance.get_runs()]
        logs = [instance.all_logs(run, of_type=kind) for run in runs]
        return len(versions(instance, MADE)), sum(map(len, logs))

    @dg.multi_asset(specs=[dg.AssetSpec(MADE)], partitions_def=LETTERS, can_subset=True)
    def make(context):
        def log(partition: str) -> Any:
            context.log_event(dg.AssetMaterialization(MADE, partition=partition))

        with dg.DagsterInstance.from_ref(instance.get_ref()) as other, events_grouped(instance):
            log("a")
            log("b")
            assert versions(other, MADE) == [], "a group's events are committed one by one"
            kind = dg.DagsterEventType.ASSET_MATERIALIZATION
            ids = storage.get_latest_storage_id_by_partition(MADE, kind, {"a", "b"})
            assert set(ids) == {"a", "b"}, "a group does not see its own events"
        assert stored() == (2, 2)
        with pytest.raises(KeyError), events_grouped(instance):
            log("c") or {}["an error"]
        assert stored() == (2, 2), "a group that failed has left events"
        log("c")
        assert stored() == (3, 3)
        yield dg.MaterializeResult(asset_key=MADE, metadata=LOGGED_ALREADY)

    result = dg.materialize([make], instance=instance, partition_key="a", raise_on_error=True)
    assert len(result.get_asset_materialization_events()) == 4, (
        "events that a step logs are not in its result any more"
    )
