"""Ordinary assets, and stages of other pipelines, as a pipeline's source."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from support.results import failure, metadata
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.asset_writer import write_asset
from vane_dagster.storage.gc import GcPolicy, collect

KEYS = ("a", "Ö / b")
PARTS = dg.StaticPartitionsDefinition(list(KEYS))
DAY = 86400.0
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture
def store(tmp_path: Path) -> vd.FragmentStore:
    return vd.FragmentStore(root=str(tmp_path / "store"))


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MAX_ROWS", 256)


class Rows:
    """What the ordinary asset returns at the moment."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def asset(self, **given: Any) -> dg.AssetsDefinition:
        @dg.asset(io_manager_key="store", backfill_policy=dg.BackfillPolicy.single_run(), **given)
        def raw_docs():
            return self.table

        return raw_docs


def table(rows: int, start: int = 0) -> pa.Table:
    numbers = range(start, start + rows)
    columns = [pa.array(numbers, pa.int64()), pa.array(map(float, numbers), pa.float64())]
    return pa.table(columns, names=["id", "n"])


def over(source: Any, name: str = "docs", partitions_def: Any = None) -> vd.Pipeline:
    made = vd.Pipeline(name, source=source, id="id", partitions_def=partitions_def)
    made.project("clean", {"n": "n * 2"}).map_batches(
        "more", add_one, schema={"more": "DOUBLE"}, batch_format="numpy"
    )
    return made


def add_one(batch):
    return {"more": batch["n"] + 1}


def run(assets: Any, store: Any, local: Any, **given: Any) -> dg.ExecuteInProcessResult:
    return dg.materialize(list(assets), resources={"compute": local, "store": store}, **given)


def more(store: Any, partition: Any = None, stage: str = "docs/more") -> list[float]:
    return vd.load(stage, partition, store=store)["more"].to_pylist()


def test_rows_of_an_ordinary_asset_and_what_was_added(store, local):
    rows = Rows(table(600))
    raw = rows.asset()
    docs = over(raw)
    first = run([raw, docs.build_assets()], store, local)
    assert more(store) == [2.0 * n + 1 for n in range(600)], "in the order of the asset's rows"
    assert metadata(first, "more")["fragments_computed"] == 3
    events = {e.asset_key: e.materialization for e in first.get_asset_materialization_events()}
    used = events[docs["clean"].key].tags["dagster/input_data_version/raw_docs"]
    assert used == events[raw.key].tags["dagster/data_version"], "it is not stale"

    again = run([raw, docs.build_assets()], store, local)
    assert metadata(again, "more")["fragments_computed"] == 0
    assert metadata(again, "more")["fragments_reused"] == 3

    rows.table = table(800)
    grown = run([raw, docs.build_assets()], store, local)
    assert metadata(grown, "more")["fragments_reused"] == 2
    assert metadata(grown, "more")["fragments_computed"] == 2
    assert more(store) == [2.0 * n + 1 for n in range(800)]

    changed = table(800).to_pandas()
    changed.loc[300, "n"] = -1.0
    rows.table = pa.Table.from_pandas(changed)
    fixed = run([raw, docs.build_assets()], store, local)
    assert metadata(fixed, "more")["fragments_computed"] == 1
    assert more(store)[300] == -1.0


def test_the_asset_is_upstream_in_dagster():
    raw = Rows(table(1)).asset(key_prefix="raw")
    for source in (raw, raw.key, vd.stored(raw), vd.stored("raw/raw_docs")):
        docs = over(source)
        (clean, _) = sorted(docs.build_assets().specs, key=lambda spec: str(spec.key))
        assert [dep.asset_key for dep in clean.deps] == [dg.AssetKey(["raw", "raw_docs"])]
        with pytest.raises(
            vd.errors.DefinitionError, match="the asset 'raw/raw_docs' writes the source"
        ):
            docs.build_source()


def test_a_partition_that_is_missing_fails_alone(store, local):
    raw = Rows(table(10)).asset(partitions_def=PARTS)
    docs = over(raw, partitions_def=PARTS)
    assert run([raw], store, local, partition_key="a").success
    plan = plan_run(docs, ["clean", "more"], KEYS, store.open())
    assert [partition.key for partition in plan.partitions] == ["a"]
    (error,) = plan.failed.values()
    assert isinstance(error, vd.errors.SourceError)
    assert "asset 'raw_docs' was never materialized" in str(error)
    assert "'Ö / b'" in str(error)


def test_an_unpartitioned_pipeline_over_all_partitions(store, local):
    opened = store.open()
    for number, key in enumerate(KEYS):
        rows = table(5, 5 * number)
        write_asset(opened, ["raw_docs"], "run", key, rows.to_reader())
    docs = over(vd.stored("raw_docs"))
    assert run([docs.build_assets()], store, local).success
    assert sorted(more(store)) == [2.0 * n + 1 for n in range(10)]


def test_a_stage_of_another_pipeline(store, local, tmp_path):
    for key, start in zip(KEYS, (0, 50)):
        write_source(tmp_path / "src" / key, table(20, start))
    first = over(vd.parquet(f"{tmp_path}/src/{{partition_key}}"), "first", PARTS)
    second = over(first["clean"], partitions_def=PARTS)
    third = over(second["clean"].key, "third", PARTS)
    assets = [first.build_assets(), second.build_assets(), third.build_assets()]
    for key in KEYS:
        assert run(assets, store, local, partition_key=key).success
    assert more(store, "Ö / b") == [4.0 * n + 1 for n in range(50, 70)]
    assert more(store, "Ö / b", "third/more") == [8.0 * n + 1 for n in range(50, 70)]
    again = run(assets, store, local, partition_key="a")
    for event in again.get_asset_materialization_events():
        found = event.materialization.metadata
        assert found["fragments_computed"].value == 0, event.asset_key

    write_source(tmp_path / "src" / "a", table(3, 90), name="b.parquet")
    grown = run(assets, store, local, partition_key="a")
    for event in grown.get_asset_materialization_events():
        found = event.materialization.metadata
        assert (found["fragments_computed"].value, found["fragments_reused"].value) == (1, 1)


def test_a_part_that_no_manifest_names_is_no_source(store, local, tmp_path):
    raw = Rows(table(10)).asset()
    docs = over(raw)
    assert run([raw], store, local).success
    (file,) = (tmp_path / "store").rglob("*.parquet")
    (file.parent / f"{'a' * 40}-{'b' * 16}.parquet").write_bytes(file.read_bytes())
    assert run([docs.build_assets()], store, local).success
    assert len(more(store)) == 10


def test_empty_rows(store, local):
    raw = Rows(table(0)).asset()
    result = run([raw, over(raw).build_assets()], store, local, raise_on_error=False)
    assert "hold no rows" in failure(result)
    allowed = over(vd.stored(raw, allow_empty=True))
    assert run([raw, allowed.build_assets()], store, local).success
    assert vd.load("docs/more", store=store).schema.names == ["id", "more"]
    # A stage without any part at all, as a source.
    below = over(vd.stored(allowed["clean"], allow_empty=True), "below")
    assert run([below.build_assets()], store, local).success
    assert vd.load("below/more", store=store).num_rows == 0


def test_garbage_and_superseded_plans(store, local, monkeypatch):
    """What is in force stays; a run over what was superseded and deleted fails with a message."""
    rows = Rows(table(300))
    raw = rows.asset()
    docs = over(raw)
    assert run([raw], store, local).success
    opened = store.open()
    former = plan_run(docs, ["clean", "more"], [None], opened)
    rows.table = table(300, 1000)
    assert run([raw], store, local).success

    now = time.time()
    for days in (1, 2):
        list(collect(opened, GcPolicy(now + days * DAY, 60.0, 3600.0)))
    gone = [Path(file.url.removeprefix("file://")) for file in former.partitions[0].files]
    assert not any(path.exists() for path in gone)
    assert run([docs.build_assets()], store, local).success
    assert len(more(store)) == 300

    monkeypatch.setattr("vane_dagster.orchestration.run.plan_run", lambda *given, **more: former)
    late = run([docs.build_assets()], store, local, raise_on_error=False)
    assert "cannot be read" in failure(late)
    assert any(path.name in failure(late) for path in gone)  # whichever is read first


def test_a_source_that_is_none():
    for source, message in (
        ("raw_docs", "source is a str; expected vd.parquet"),
        (7, "source is a int; expected vd.parquet"),
    ):
        with pytest.raises(vd.errors.DefinitionError, match=message):
            over(source)
