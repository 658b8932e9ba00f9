"""The checks of stages in Dagster: evaluated for each partition, and gating downstream stages."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from support.results import evaluations, failure, over, statuses
from vane_dagster import checks

DAYS = dg.StaticPartitionsDefinition(["a", "b", "c"])
SCHEMA = {"vector": "FLOAT[2]", "label": "VARCHAR"}


def embed(batch: pa.Table) -> pa.Table:
    texts = batch["text"].to_pylist()
    vectors = [[0.0, 0.0] if "zero" in t else [1.0, float(len(t))] for t in texts]
    labels = [None if "null" in t else "" if "blank" in t else t for t in texts]
    return pa.table({"vector": pa.array(vectors, pa.list_(pa.float32(), 2)), "label": labels})


def source(tmp_path, key: str, texts: list[str]) -> None:
    table = {"id": pa.array(range(len(texts)), pa.int64()), "text": texts}
    write_source(tmp_path / "source" / key, table)


def pipeline(tmp_path, given=(), below: bool = True) -> vd.Pipeline:
    source = vd.parquet(str(tmp_path / "source" / "{partition_key}"))
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=DAYS)
    vectors = docs.map_batches("vectors", embed, schema=SCHEMA, asset=vd.Asset(checks=given))
    if below:
        vectors.project("labels", ["label"]).write("out", str(tmp_path / "out/{partition_key}"))
    return docs


class Runs:
    """Runs of one instance over one store."""

    def __init__(self, tmp_path, compute, instance) -> None:
        self.instance = instance
        self.store = vd.FragmentStore(root=str(tmp_path / "store"))
        self.compute = compute

    def __call__(self, docs, *keys, selection=None):
        return dg.materialize(
            [docs.build_assets()],
            instance=self.instance,
            selection=selection,
            resources={"compute": self.compute, "store": self.store},
            raise_on_error=False,
            **over(*keys),
        )

    def sequence(self, stage: str, partition: str | None = None) -> int:
        found = self.store.open().latest("docs", stage, [partition])
        return found[partition].sequence if found else 0


@pytest.fixture
def runs(tmp_path, local) -> Iterator[Runs]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Runs(tmp_path, local, instance)


def materializations(result, instance) -> list[dg.AssetMaterialization]:
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    events = instance.all_logs(result.run_id, of_type=kind)
    return [event.asset_materialization for event in events]


def values(evaluation: dg.AssetCheckEvaluation) -> dict:
    return {name: value.value for name, value in evaluation.metadata.items()}


def test_every_stage_has_checks_for_each_partition_with_numbers(tmp_path, runs):
    for key in "ab":
        source(tmp_path, key, ["one", "two", "null", "blank"])
    result = runs(pipeline(tmp_path), "a", "b")
    assert result.success
    found = evaluations(result, runs.instance)
    assert set(found) == {
        (stage, name, key)
        for key in "ab"
        for stage, names in {
            "vectors": ["rows", "quality"],
            "labels": ["rows"],
            "out": ["rows"],
        }.items()
        for name in names
    }
    assert all(evaluation.passed for evaluation in found.values())
    blocking = {name for (_, name, _), e in found.items() if e.blocking}
    assert blocking == {"rows"}
    ids = values(found["vectors", "rows", "a"])
    assert (ids["rows_in"], ids["rows"], ids["filtered"], ids["quarantined"]) == (4, 4, 0, 0)
    assert 0.25 in values(found["vectors", "quality", "b"]).values()
    table = found["vectors", "rows", "a"].metadata["findings"].records
    assert [record.data["finding"] for record in table] == ["ids_complete", "error_rate", "vectors"]
    key = dg.AssetCheckKey(dg.AssetKey(["docs", "vectors"]), "rows")
    history = runs.instance.event_log_storage.get_asset_check_execution_history(key, 10)
    assert {record.partition for record in history} == {"a", "b"}
    assert {record.status.value for record in history} == {"SUCCEEDED"}


def test_a_blocking_check_leaves_what_lies_below_as_it_was(tmp_path, runs):
    given = [checks.Vectors(blocking=True)]
    for key in "abc":
        source(tmp_path, key, ["one", "two"])
    assert runs(pipeline(tmp_path, given), "a", "b", "c").success
    before = sorted(p.name for p in (tmp_path / "out" / "b").glob("*.parquet"))
    for key, texts in {"a": ["three", "four"], "b": ["five", "zero"], "c": ["six"]}.items():
        source(tmp_path, key, texts)
    result = runs(pipeline(tmp_path, given), "a", "b", "c")
    message = failure(result)
    assert "'vectors'" in message
    assert "1 of 3 partitions failed ('b')" in message
    assert "its former version stays in force" in message
    stages = ("vectors", "labels", "out")
    assert {s: runs.sequence(s, "a") for s in stages} == {"vectors": 2, "labels": 2, "out": 2}
    assert {s: runs.sequence(s, "b") for s in stages} == {"vectors": 2, "labels": 1, "out": 1}
    assert {s: runs.sequence(s, "c") for s in stages} == {"vectors": 2, "labels": 2, "out": 2}
    assert sorted(p.name for p in (tmp_path / "out" / "b").glob("*.parquet")) == before
    found = evaluations(result, runs.instance)
    assert not found["vectors", "vectors", "b"].passed
    assert found["vectors", "vectors", "a"].passed
    assert not [key for key in found if key[0] != "vectors" and key[2] == "b"]
    made = {(m.asset_key.path[-1], m.partition) for m in materializations(result, runs.instance)}
    assert ("vectors", "b") in made
    assert ("labels", "b") not in made


def test_the_check_blocks_later_runs_too_until_its_cause_is_fixed(tmp_path, runs):
    source(tmp_path, "a", ["one", "zero"])
    docs = pipeline(tmp_path, [checks.Vectors(blocking=True)])
    assert "has no former version" in failure(runs(docs, "a"))
    assert not runs(docs, "a").success
    check, other = (
        dg.AssetSelection.checks(dg.AssetCheckKey(docs["vectors"].key, name))
        for name in ("vectors", "rows")
    )
    passed = runs(docs, selection=other)
    assert passed.success
    assert not materializations(passed, runs.instance)
    failed = runs(docs, "a", selection=check | dg.AssetSelection.assets(docs["labels"].key))
    assert "stage 'vectors', partition 'a': vectors: " in failure(failed)
    alone = failure(runs(docs, "a", selection=[docs["labels"].key]))
    assert "'vectors'" in alone, "else a backfill that goes on from its failure would publish"
    assert [runs.sequence(stage, "a") for stage in ("vectors", "labels")] == [1, 0]
    tolerant = pipeline(tmp_path, [checks.Vectors(max_rate=0.5, blocking=True)])
    assert runs(tolerant, "a", selection=[tolerant["labels"].key]).success
    result = runs(tolerant, "a")
    assert evaluations(result, runs.instance)["vectors", "vectors", "a"].passed
    assert [runs.sequence(stage, "a") for stage in ("vectors", "out")] == [1, 1]


def test_a_partition_with_lost_rows_is_not_committed(tmp_path, runs, monkeypatch):
    source(tmp_path, "a", ["one"])
    described = "1 of 1 input rows are missing from the output"
    outcome = checks.CheckOutcome(False, described, {"lost": 1})
    monkeypatch.setattr(checks.IdsComplete, "evaluate", lambda *_: outcome)
    for given in ((), [checks.IdsComplete()]):
        result = runs(pipeline(tmp_path, given, below=False), "a")
        assert described in failure(result)
        assert not evaluations(result, runs.instance)
        assert runs.sequence("vectors", "a") == 0


def test_drift_against_the_partition_before(tmp_path, runs):
    given = [checks.Drift("label", min_rows=10, severity="ERROR", blocking=True)]
    source(tmp_path, "a", ["x", "y"] * 100)
    source(tmp_path, "b", ["x", "y"] * 90)
    source(tmp_path, "c", ["x"] * 10 + ["z"] * 190)
    result = runs(pipeline(tmp_path, given), "a", "b", "c")
    found = evaluations(result, runs.instance)
    assert [found["vectors", "drift_label", key].passed for key in "abc"] == [True, True, False]
    assert values(found["vectors", "drift_label", "b"])["previous"] == "a"
    assert values(found["vectors", "drift_label", "c"])["previous"] == "b"
    assert [runs.sequence("labels", key) for key in "abc"] == [1, 1, 0]


def test_partitions_are_counted_by_what_their_latest_rows_are(tmp_path, runs):
    """Dagster forgets an evaluation that does not say which materialization it is of."""
    for key, texts in {"a": ["one"], "b": ["zero"], "c": ["one"]}.items():
        source(tmp_path, key, texts)
    docs = pipeline(tmp_path, [checks.Vectors()], below=False)
    key = dg.AssetCheckKey(docs["vectors"].key, "vectors")
    assert runs(docs, "a", "b", "c").success
    assert statuses(runs.instance, key, "abc") == {"SUCCEEDED": {"a", "c"}, "FAILED": {"b"}}
    source(tmp_path, "a", ["zero"])
    source(tmp_path, "b", ["one"])
    table = pa.table({"id": pa.array([1, 1], pa.int64()), "text": ["x", "y"]})
    write_source(tmp_path / "source" / "c", table)
    failed = runs(docs, "a", "b", "c")
    assert not failed.success
    # partition c failed before it was committed, so that of its version in force still counts
    assert ("vectors", "vectors", "c") not in evaluations(failed, runs.instance)
    history = runs.instance.event_log_storage.get_asset_check_execution_history(key, 50)
    assert "PLANNED" not in {record.status.value for record in history}
    assert statuses(runs.instance, key, "abc") == {"SUCCEEDED": {"b", "c"}, "FAILED": {"a"}}
