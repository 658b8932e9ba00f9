"""Dagster's events of a run: how many writes they take, and what is in them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.event_world import (  # noqa: F401  # fixtures
    KEYS,
    STAGES,
    World,
    embed,
    instance,
    materializations,
    one_group,
    world,
)
from support.results import evaluations, statuses


def logged(instance: dg.DagsterInstance, run_id: str) -> str:
    return "\n".join(entry.message for entry in instance.all_logs(run_id))


def test_events_in_a_group_refer_to_each_other_and_the_last_has_the_columns(
    world, instance, one_group
):
    result = world.run(instance, *KEYS[:4])
    assert result.success
    ids = {
        (record.asset_key.path[-1], record.asset_materialization.partition): record.storage_id
        for stage in STAGES
        for record in instance.fetch_materializations(dg.AssetKey(["docs", stage]), 100).records
    }
    for stage in STAGES:
        found = materializations(instance, stage)
        assert sorted(found) == KEYS[:4]
        with_columns = [k for k, m in found.items() if "dagster/column_schema" in m.metadata]
        assert with_columns == [list(found)[-1]]
        assert "dagster/column_lineage" in found[with_columns[0]].metadata
        assert {m.metadata["dagster/partition_row_count"].value for m in found.values()} == {2}
    for partition, made in materializations(instance, "labels").items():
        pointer = made.tags["dagster/input_event_pointer/docs/vectors"]
        assert pointer == str(ids["vectors", partition])
    found = evaluations(result, instance)
    assert len(found) == 4 * len(world.pipeline().build_assets().check_keys)
    for (stage, _, partition), evaluation in found.items():
        target = evaluation.target_materialization_data
        assert (target.storage_id, target.run_id) == (ids[stage, partition], result.run_id)
    key = dg.AssetCheckKey(dg.AssetKey(["docs", "vectors"]), "vectors")
    assert statuses(instance, key, KEYS) == {"SUCCEEDED": set(KEYS[:4])}


def test_what_lacks_its_event_is_reported_by_the_next_run(world, instance, tmp_path):
    """As after a kill between the commit and its event: the manifest alone is there."""
    with dg.DagsterInstance.ephemeral() as other:
        assert world.run(other, *KEYS[:2]).success
    result = world.run(instance, *KEYS[:2])
    assert result.success
    for stage in STAGES:
        found = materializations(instance, stage)
        assert list(found) == KEYS[:2]
        assert {m.metadata["fragments_computed"].value for m in found.values()} == {0}
    assert evaluations(result, instance)


def asset_below(docs: vd.Pipeline) -> dg.AssetsDefinition:
    policy = dg.BackfillPolicy.single_run() if docs.partitions_def else None

    @dg.multi_asset(
        specs=[dg.AssetSpec("below", deps=[docs["vectors"].key])],
        partitions_def=docs.partitions_def,
        backfill_policy=policy,
    )
    def below() -> Iterator[dg.MaterializeResult]:
        yield dg.MaterializeResult(asset_key="below")

    return below


SKIPPED = "did not yield or return expected outputs"
UNGATED = "emitted no result"


@pytest.mark.parametrize("keys", [KEYS[:3], ()], ids=["range", "unpartitioned"])
def test_planned_checks_give_results_that_dagster_sees(world, instance, caplog, keys):
    docs = world.pipeline(partitioned=bool(keys))
    result = world.run(instance, *keys, assets=[docs.build_assets(), asset_below(docs)])
    assert result.success
    assert SKIPPED not in logged(instance, result.run_id)
    assert UNGATED not in caplog.text + logged(instance, result.run_id)
    assert not [e for e in result.all_events if e.is_step_skipped]
    found = evaluations(result, instance)
    assert {partition for _, _, partition in found} == set(keys or [None])
    selection = dg.AssetSelection.checks(dg.AssetCheckKey(docs["vectors"].key, "vectors"))
    alone = world.run(instance, assets=[docs.build_assets()], selection=selection)
    assert alone.success
    assert SKIPPED not in logged(instance, alone.run_id)
    assert len(evaluations(alone, instance)) == len(keys or [None])


def test_a_failed_blocking_check_withholds_an_ordinary_asset_below(world, instance, caplog):
    world.source("p00", ["zero"])
    docs = world.pipeline()
    result = world.run(instance, "p00", assets=[docs.build_assets(), asset_below(docs)])
    assert not result.success
    assert UNGATED not in caplog.text
    assert not instance.fetch_materializations(dg.AssetKey("below"), limit=1).records
    found = evaluations(result, instance)
    assert not found["vectors", "vectors", "p00"].passed
    assert {stage for stage, _, _ in found} == {"vectors"}
    history = instance.event_log_storage.get_asset_check_execution_history
    for key in docs.build_assets().check_keys:
        assert {record.status.value for record in history(key, 10)} <= {"SUCCEEDED", "FAILED"}


def fails_once(batch: pa.Table, folder: str) -> pa.Table:
    marker = Path(folder) / "failed"
    if "poison" in batch["text"].to_pylist() and not marker.exists():
        marker.touch()
        raise OSError("the network was away")
    return embed(batch)


def test_a_second_attempt_leaves_one_execution_of_each_check(world, instance, tmp_path):
    world.source("p01", ["poison"])
    fn = functools.partial(fails_once, folder=str(tmp_path))
    docs = world.pipeline(fn, retry_policy=dg.RetryPolicy(max_retries=1))
    assert world.run(instance, "p00", "p01", assets=[docs.build_assets()]).success
    for name in ("rows", "quality"):
        key = dg.AssetCheckKey(docs["vectors"].key, name)
        history = instance.event_log_storage.get_asset_check_execution_history(key, 10)
        found = sorted((record.partition, record.status.value) for record in history)
        assert found == [("p00", "SUCCEEDED"), ("p01", "SUCCEEDED")]
        assert statuses(instance, key, KEYS) == {"SUCCEEDED": {"p00", "p01"}}
