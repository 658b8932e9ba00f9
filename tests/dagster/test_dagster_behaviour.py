"""What we lean on in Dagster and it does not promise, tried on assets that are none of ours.

If one of these fails after an upgrade of Dagster, change `orchestration/reporting.py` and
`orchestration/event_log.py`, even if all other tests pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions import data_version
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest
from dagster._core.storage.partition_status_cache import get_and_update_asset_status_cache_value

from vane_dagster.orchestration.event_log import DATA_VERSION, events_grouped
from vane_dagster.orchestration.reporting import LOGGED_ALREADY

LETTERS = dg.StaticPartitionsDefinition(["a", "b", "c"])
OURS = {"dagster/data_version_is_user_provided": "true"}
UPSTREAM, MADE, BELOW = dg.AssetKey("upstream"), dg.AssetKey("made"), dg.AssetKey("below")


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


def test_marked_result_writes_no_event_and_lets_steps_below_run(instance):
    @dg.multi_asset(
        specs=[dg.AssetSpec(MADE)],
        partitions_def=LETTERS,
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
    )
    def make(context):
        for key in context.partition_keys:
            tags = {DATA_VERSION: f"version of {key}"}
            context.log_event(dg.AssetMaterialization(MADE, partition=key, tags=tags))
        yield dg.MaterializeResult(asset_key=MADE, metadata=LOGGED_ALREADY)

    @dg.multi_asset(
        specs=[dg.AssetSpec(BELOW, deps=[MADE])],
        partitions_def=LETTERS,
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def below():
        return dg.MaterializeResult(asset_key=BELOW)

    assert dg.materialize([make, below], instance=instance, tags=across("a", "b")).success

    assert versions(instance, MADE) == [("a", "version of a"), ("b", "version of b")], (
        "a result with the mark LOGGED_ALREADY writes events again, beside those logged by hand"
    )
    assert sorted(key for key, _ in versions(instance, BELOW)) == ["a", "b"], (
        "a result with the mark LOGGED_ALREADY does not count as an output any more: steps below "
        "are skipped"
    )


def test_logged_event_is_in_the_event_log_while_the_step_goes_on(instance):
    recorded = []

    @dg.multi_asset(specs=[dg.AssetSpec(MADE)])
    def make(context):
        context.log_event(dg.AssetMaterialization(MADE, tags={DATA_VERSION: "1"}))
        recorded.extend(versions(context.instance, MADE))
        yield dg.MaterializeResult(asset_key=MADE, metadata=LOGGED_ALREADY)

    assert dg.materialize([make], instance=instance).success

    assert recorded == [(None, "1")], (
        "log_event holds events back until the step ends: a partition would not show as "
        "materialized as soon as it is"
    )


def test_logged_provenance_decides_what_is_stale(instance):
    """Event pointers and data versions of inputs, as tags of events that were logged by hand."""
    upstream = dg.AssetSpec(UPSTREAM, partitions_def=LETTERS)
    made = dg.AssetSpec(MADE, deps=[UPSTREAM], code_version="1", partitions_def=LETTERS)
    below = dg.AssetSpec(BELOW, deps=[MADE], code_version="1", partitions_def=LETTERS)
    provenance: dict[dg.AssetKey, Mapping[str, str]] = {}

    @dg.multi_asset(specs=[made, below], can_subset=True)
    def make(context):
        for key in (MADE, BELOW):
            tags = {
                DATA_VERSION: f"{key.to_user_string()} of {context.partition_key}",
                "dagster/code_version": "1",
                **OURS,
                **provenance[key],
            }
            context.log_event(
                dg.AssetMaterialization(key, partition=context.partition_key, tags=tags)
            )
            yield dg.MaterializeResult(asset_key=key, metadata=LOGGED_ALREADY)

    @dg.multi_asset(specs=[upstream])
    def write(context):
        context.log_event(
            dg.AssetMaterialization(
                UPSTREAM,
                partition=context.partition_key,
                tags={DATA_VERSION: context.run.tags["version"], **OURS},
            )
        )
        yield dg.MaterializeResult(asset_key=UPSTREAM, metadata=LOGGED_ALREADY)

    def run(asset: dg.AssetsDefinition, version: str = "") -> None:
        tags = {"version": version} if version else {}
        given = {"instance": instance, "partition_key": "a", "tags": tags}
        assert dg.materialize([write, make], selection=[asset], **given).success

    def stale() -> set[str]:
        graph = dg.Definitions(assets=[write, make]).resolve_asset_graph()
        resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
        return {
            key.to_user_string()
            for key in (MADE, BELOW)
            if resolver.get_status(key, "a").value != "FRESH"
        }

    def read(key: dg.AssetKey, version: str) -> dict[str, str]:
        """The tags of what has read the latest event of an asset, in a version."""
        name = key.to_user_string()
        records = instance.fetch_materializations(key, limit=1).records
        pointer = str(records[0].storage_id) if records else "NULL"
        return {
            f"dagster/input_data_version/{name}": version,
            f"dagster/input_event_pointer/{name}": pointer,
        }

    run(write, "v1")
    provenance = {MADE: read(UPSTREAM, "v1"), BELOW: read(MADE, "made of a")}
    run(make)
    assert stale() == set(), (
        "events logged by hand with provenance are stale at once: Dagster reads other tags"
    )

    run(write, "v2")
    assert stale() == {"made"}, (
        "an upstream with another data version does not make an event logged by hand stale"
    )

    run(write, "v1")
    assert stale() == set(), (
        "an upstream that was written again as it was makes an event logged by hand stale: Dagster "
        "compares something else than data versions"
    )

    provenance = {MADE: {}, BELOW: {}}
    run(make)
    assert stale() == {"made", "below"}, (
        "events without provenance are taken for fresh now: provenance.py may not be needed"
    )


def test_tags_of_provenance_have_the_names_that_dagster_reads():
    names = (
        data_version.DATA_VERSION_TAG,
        data_version.CODE_VERSION_TAG,
        data_version.DATA_VERSION_IS_USER_PROVIDED_TAG,
        data_version.get_input_data_version_tag(dg.AssetKey(["x", "y"])),
        data_version.get_input_event_pointer_tag(dg.AssetKey(["x", "y"])),
    )
    assert names == (
        "dagster/data_version",
        "dagster/code_version",
        "dagster/data_version_is_user_provided",
        "dagster/input_data_version/x/y",
        "dagster/input_event_pointer/x/y",
    )
    assert data_version.DEFAULT_DATA_VERSION.value == "INITIAL"
    assert data_version.NULL_EVENT_POINTER == "NULL"


def test_failed_step_fails_the_partitions_that_were_not_logged_and_no_others(instance):
    @dg.multi_asset(
        specs=[dg.AssetSpec(MADE), dg.AssetSpec(BELOW, deps=[MADE])],
        partitions_def=LETTERS,
        backfill_policy=dg.BackfillPolicy.single_run(),
        can_subset=True,
    )
    def make(context):
        for key, partition in ((MADE, "a"), (MADE, "c"), (BELOW, "a")):
            context.log_event(dg.AssetMaterialization(key, partition=partition))
        raise dg.Failure("some partitions failed")

    def statuses(key: dg.AssetKey) -> tuple[list[str], list[str]]:
        """The partitions that Dagster shows as materialized, and those that it shows as failed."""
        cache = get_and_update_asset_status_cache_value(instance, key, LETTERS)
        assert cache is not None
        done = cache.deserialize_materialized_partition_subsets(LETTERS)
        failed = cache.deserialize_failed_partition_subsets(LETTERS)
        return sorted(done.get_partition_keys()), sorted(failed.get_partition_keys())

    given = {"instance": instance, "tags": across("a", "c"), "raise_on_error": False}
    assert not dg.materialize([make], **given).success

    assert (statuses(MADE), statuses(BELOW)) == ((["a", "c"], ["b"]), (["a"], ["b", "c"])), (
        "after a failed step Dagster does not take exactly the partitions without an event for "
        "failed"
    )


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
