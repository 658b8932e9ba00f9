"""Dagster's events of runs: materializations and checks, for each partition."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from support.event_world import (  # noqa: F401  # fixtures
    KEYS,
    STAGES,
    database,
    embed,
    instance,
    materializations,
    one_group,
    world,
)
from support.results import evaluations, failure, statuses
from vane_dagster.orchestration import steps

VECTORS = dg.AssetKey(["docs", "vectors"])
SKIPPED = "did not yield or return expected outputs"
UNGATED = "emitted no result"


def logged(instance: dg.DagsterInstance, run_id: str) -> str:
    return "\n".join(entry.message for entry in instance.all_logs(run_id))


def history(instance: dg.DagsterInstance, name: str) -> list[tuple[str | None, str]]:
    """The executions of a check of `vectors`, by partition and status."""
    storage, key = instance.event_log_storage, dg.AssetCheckKey(VECTORS, name)
    found = storage.get_asset_check_execution_history(key, 50)
    return sorted((record.partition or "", record.status.value) for record in found)


def asset_below(docs: vd.Pipeline) -> dg.AssetsDefinition:
    """An ordinary asset that depends on a stage."""
    policy = dg.BackfillPolicy.single_run() if docs.partitions_def else None

    @dg.multi_asset(
        specs=[dg.AssetSpec("below", deps=[docs["vectors"].key])],
        partitions_def=docs.partitions_def,
        backfill_policy=policy,
    )
    def below() -> Iterator[dg.MaterializeResult]:
        yield dg.MaterializeResult(asset_key="below")

    return below


@pytest.mark.parametrize("keys", [KEYS[:4], ()], ids=["range", "unpartitioned"])
def test_a_run_logs_each_partition_with_its_checks(world, instance, one_group, caplog, keys):
    docs = world.pipeline(partitioned=bool(keys))
    places = [*keys] or [None]
    with dg.DagsterInstance.ephemeral() as other:
        assert world.run(other, *keys, assets=[docs.build_assets()]).success

    # As after a kill between commits and their events: the manifests alone are there.
    result = world.run(instance, *keys, assets=[docs.build_assets(), asset_below(docs)])
    assert result.success
    ids = {
        (record.asset_key.path[-1], record.asset_materialization.partition): record.storage_id
        for stage in STAGES
        for record in instance.fetch_materializations(dg.AssetKey(["docs", stage]), 100).records
    }
    rows = "dagster/partition_row_count" if keys else "dagster/row_count"
    for stage in STAGES:
        found = materializations(instance, stage)
        assert sorted(found, key=str) == places
        assert {m.metadata["rows_computed"].value for m in found.values()} == {0}
        assert {m.metadata[rows].value for m in found.values()} == {2}
        with_columns = [k for k, m in found.items() if "dagster/column_schema" in m.metadata]
        assert with_columns == [list(found)[-1]], "they are large"
        assert "dagster/column_lineage" in found[with_columns[0]].metadata

    # Events of a group refer to each other: to the newest, a valid pointer for all partitions.
    newest = max(ids["vectors", partition] for partition in places)
    for made in materializations(instance, "labels").values():
        assert made.tags["dagster/input_event_pointer/docs/vectors"] == str(newest)
    evaluated = evaluations(result, instance)
    checks = list(docs.build_assets().check_keys)
    assert len(evaluated) == len(places) * len(checks)
    for (stage, _, partition), evaluation in evaluated.items():
        target = evaluation.target_materialization_data
        assert (target.storage_id, target.run_id) == (ids[stage, partition], result.run_id)
        assert evaluation.passed

    # Dagster counts all checks, by partition, and gates by those that block.
    assert SKIPPED not in logged(instance, result.run_id)
    assert UNGATED not in caplog.text + logged(instance, result.run_id)
    assert not [e for e in result.all_events if e.is_step_skipped]
    assert {n for (_, n, _), e in evaluated.items() if e.blocking} == {"rows", "vectors"}
    counts = evaluated["vectors", "rows", places[0]].metadata
    assert [counts[n].value for n in ("rows_in", "rows", "filtered", "quarantined")] == [2, 2, 0, 0]
    findings = [record.data["finding"] for record in counts["findings"].records]
    assert findings == ["ids_complete", "error_rate"]
    if keys:
        key = dg.AssetCheckKey(VECTORS, "vectors")
        assert statuses(instance, key, KEYS) == {"SUCCEEDED": set(keys)}

    # A check can be executed alone, for all that is materialized.
    selection = dg.AssetSelection.checks(dg.AssetCheckKey(VECTORS, "vectors"))
    alone = world.run(instance, assets=[docs.build_assets()], selection=selection)
    assert alone.success
    assert SKIPPED not in logged(instance, alone.run_id)
    assert len(evaluations(alone, instance)) == len(places)
    assert not alone.get_asset_materialization_events()


def test_a_failed_check_withholds_what_lies_below_until_its_cause_is_fixed(world, instance, caplog):
    docs, key = world.pipeline(), dg.AssetCheckKey(VECTORS, "vectors")
    opened = vd.FragmentStore(root=str(world.root / "store")).open()

    def sequences(partition: str) -> list[int]:
        found = [opened.latest("docs", stage, [partition]) for stage in STAGES]
        return [each[partition].sequence if each else 0 for each in found]

    # A first version passes; the next one has a zero vector, in one of three partitions.
    assert world.run(instance, *KEYS[:3]).success
    for partition, texts in {"p00": ["three"], "p01": ["zero"], "p02": ["four"]}.items():
        world.source(partition, texts)
    result = world.run(instance, *KEYS[:3], assets=[docs.build_assets(), asset_below(docs)])
    message = failure(result)
    assert "1 of 3 partitions failed ('p01')" in message
    assert "blocking check 'vectors' of the upstream stage 'vectors' failed" in message
    assert "its former version stays in force" in message
    assert [sequences(partition) for partition in KEYS[:3]] == [[2, 2], [2, 1], [2, 2]]
    assert UNGATED not in caplog.text
    assert not instance.fetch_materializations(dg.AssetKey("below"), limit=1).records
    evaluated = evaluations(result, instance)
    passed = {k: e.passed for (stage, name, k), e in evaluated.items() if name == "vectors"}
    assert passed == {"p00": True, "p01": False, "p02": True}
    assert ("labels", "rows", "p01") not in evaluated
    assert "PLANNED" not in {status for _, status in history(instance, "vectors")}
    assert statuses(instance, key, KEYS) == {"SUCCEEDED": {"p00", "p02"}, "FAILED": {"p01"}}

    # It blocks later runs too, else a backfill that goes on from its failure would publish.
    assert "'vectors'" in failure(world.run(instance, "p01"))
    labels = dg.AssetSelection.assets(docs["labels"].key)
    check = dg.AssetSelection.checks(key)
    for selection, words in (
        (labels, "blocking check 'vectors'"),
        (check | labels, "stage 'vectors', partition 'p01': vectors failed: "),
    ):
        again = world.run(instance, "p01", assets=[docs.build_assets()], selection=selection)
        assert words in failure(again)
    assert sequences("p01") == [2, 1]

    # A partition that fails before its commit keeps the verdict of its version in force.
    world.source("p01", ["fixed"])
    write_source(world.root / "source" / "p00", {"id": [1, 1], "text": ["x", "y"]})
    assert not world.run(instance, "p00", "p01").success
    assert statuses(instance, key, KEYS) == {"SUCCEEDED": {"p00", "p01", "p02"}}
    assert sequences("p01") == [3, 2]


class Broken(vd.LocalCompute):
    """Ends a run before its step begins, as a run does that is cancelled in the queue."""

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        raise RuntimeError("no machine")


@pytest.mark.parametrize("left", ["FAILED", "PLANNED"])
def test_a_check_has_the_status_of_its_last_evaluation(world, instance, monkeypatch, left):
    """Whatever runs began meanwhile, and what they left."""
    key, proceed = dg.AssetCheckKey(VECTORS, "vectors"), steps.run_pipeline
    docs = world.pipeline().build_assets()

    def broken() -> None:
        resources = {"compute": Broken(), "store": vd.FragmentStore(root=str(world.root / "store"))}
        given = {"partition_key": "p00", "raise_on_error": False, "instance": instance}
        assert not dg.materialize([docs], resources=resources, **given).success

    def overlapped(*args, **given):
        """Begin and end another run of a partition while a run of two goes on."""
        monkeypatch.setattr(steps, "run_pipeline", proceed)
        assert history(instance, "vectors") == [], "what a run that is killed now leaves"
        if left == "FAILED":
            world.source("p00", ["zero"])
            assert not world.run(instance, "p00").success
            assert statuses(instance, key, KEYS) == {"FAILED": {"p00"}}
            world.source("p00", ["one"])
        else:
            broken()
        return proceed(*args, **given)

    monkeypatch.setattr(steps, "run_pipeline", overlapped)
    assert world.run(instance, "p00", "p01").success
    assert statuses(instance, key, KEYS) == {"SUCCEEDED": {"p00", "p01"}}
    executions = [("p00", left), ("p00", "SUCCEEDED"), ("p01", "SUCCEEDED")]
    assert history(instance, "vectors") == executions

    # A run that ends before its step hides them until the next step, of any partition.
    broken()
    assert statuses(instance, key, KEYS) == {"EXECUTION_FAILED": {"p00"}, "SUCCEEDED": {"p01"}}
    assert world.run(instance, "p02").success
    assert statuses(instance, key, KEYS) == {"SUCCEEDED": {"p00", "p01", "p02"}}


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
        assert history(instance, name) == [("p00", "SUCCEEDED"), ("p01", "SUCCEEDED")]
        key = dg.AssetCheckKey(VECTORS, name)
        assert statuses(instance, key, KEYS) == {"SUCCEEDED": {"p00", "p01"}}
