"""Ordinary assets in the store as a pipeline's source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage
from support.in_process import compute
from support.stored import KEYS, keep
from support.stored import local_store as store  # noqa: F401  # fixture
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.store import Store

STAGES = ["clean"]


def rows(count: int, start: int = 0) -> pa.Table:
    return pa.table({"id": pa.array(range(start, start + count), pa.int64())})


def over(source: Any, name: str = "docs", partitions_def: Any = None) -> vd.Pipeline:
    made = vd.Pipeline(name, source=source, id="id", partitions_def=partitions_def)
    made.project("clean", ["id"])
    return made


def ids(store: Store, pipeline: str = "docs") -> list[int]:
    found: list[int] = read_stage(Path(store.root.path), pipeline, "clean")["id"].to_pylist()
    return sorted(found)


def test_the_asset_is_upstream_in_dagster():
    @dg.asset(key_prefix="raw", io_manager_key="store")
    def docs():
        return rows(1)

    path = ["raw", "docs"]
    file = vd.parquet("docs", asset=path)
    for source in (docs, docs.key, *map(vd.stored, (docs, "raw/docs", path, (*path,))), file):
        made = over(source, "made")
        (clean,) = made.build_assets().specs
        assert [dep.asset_key for dep in clean.deps] == [dg.AssetKey(["raw", "docs"])]
        with pytest.raises(DefinitionError, match="the asset 'raw/docs' writes the source"):
            made.build_source()
    for wrong in ([], ["raw", 7], 7):
        with pytest.raises(DefinitionError, match=r"asset is a .*; expected an asset key"):
            vd.stored(wrong)
    for wrong, kind in (("raw/docs", "str"), (7, "int")):
        with pytest.raises(DefinitionError, match=f"source is a {kind}; expected vd.parquet"):
            over(wrong)


def test_partitions_are_read_by_their_keys_or_all_together(store):
    for number, key in enumerate(KEYS[1:]):
        keep(store, "raw", key, rows(5, 5 * number))
    keyed = over(vd.stored("raw"), partitions_def=dg.StaticPartitionsDefinition([*KEYS]))
    plan = plan_run(keyed, STAGES, KEYS, store)
    assert [partition.key for partition in plan.partitions] == [*KEYS[1:]]
    (error,) = plan.failed.values()
    assert isinstance(error, SourceError)
    assert "asset 'raw' was never materialized" in str(error)
    assert f"in partition {KEYS[0]!r}; materialize it first. An asset that" in str(error)

    # A partition reads no other one, and nothing that has no partitions.
    keep(store, "whole", None, rows(5))
    for asset, has in (("raw", f"partitions '{KEYS[2]}', '{KEYS[1]}'"), ("whole", "it as a whole")):
        single = dg.StaticPartitionsDefinition([KEYS[0]])
        over_it = over(vd.stored(asset), partitions_def=single)
        (error,) = plan_run(over_it, STAGES, [KEYS[0]], store).failed.values()
        assert f"as its IO manager. It has {has}, but a partition reads the one" in str(error)

    # A part that no manifest names is none of its rows.
    file = next(Path(store.root.path).rglob("*.parquet"))
    (file.parent / f"{'a' * 40}-{'b' * 16}.parquet").write_bytes(file.read_bytes())
    compute(over(vd.stored("raw")), store)
    assert ids(store) == [*range(10)]


def test_a_partition_reads_what_its_mapping_names(store):
    days = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-10")
    for number, key in enumerate(keys := days.get_partition_keys()[:4]):
        keep(store, "raw", key, rows(5, 5 * number))
    earlier = dg.TimeWindowPartitionMapping(start_offset=-2)
    source = vd.stored("raw", partitions_def=days, partition_mapping=earlier)
    docs = over(source, partitions_def=days)
    compute(docs, store, [keys[3]])
    found = read_stage(Path(store.root.path), "docs", "clean", keys[3])["id"].to_pylist()
    assert sorted(found) == [*range(5, 20)]
    (error,) = plan_run(docs, STAGES, ["2026-01-05"], store).failed.values()
    assert "in partition '2026-01-05'; materialize it first" in str(error)
    weeks = dg.WeeklyPartitionsDefinition("2025-12-28", end_date="2026-01-11")
    weekly = over(vd.stored("raw", partitions_def=days), partitions_def=weeks)
    (error,) = plan_run(weekly, STAGES, ["2025-12-28"], store).failed.values()
    assert "has no partition '2025-12-28', which partition '2025-12-28' reads" in str(error)
    assert "(allow_nonexistent_upstream_partitions=True)" in str(error)
    (dep,) = next(iter(docs.build_assets().specs)).deps
    assert dep.partition_mapping == earlier

    with pytest.raises(DefinitionError, match="expected partitions_def of the pipeline and of"):
        over(vd.stored("raw", partition_mapping=earlier), partitions_def=days)
    static = dg.StaticPartitionsDefinition([*KEYS])
    with pytest.raises(DefinitionError, match="source asset raw: Downstream partitions def"):
        over(source, partitions_def=static)


def test_an_asset_without_rows_has_to_be_allowed(store):
    keep(store, "raw", None, rows(0))
    (error,) = plan_run(over(vd.stored("raw")), STAGES, [None], store).failed.values()
    assert "hold no rows" in str(error)
    allowed = over(vd.stored("raw", allow_empty=True))
    below = over(vd.stored(allowed["clean"], allow_empty=True), "below")  # without any part at all
    for pipeline in (allowed, below):
        compute(pipeline, store)
        assert ids(store, pipeline.name) == []


def test_rows_that_were_added_or_changed_are_all_that_is_computed(store, monkeypatch):
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MAX_ROWS", 256)
    below = over(vd.stored("docs/clean"), "below")
    docs = over(vd.stored("raw"))
    changed = [*range(300), -1, *range(301, 800)]
    for numbers, computed in ((range(600), 3), (range(600), 0), (range(800), 2), (changed, 1)):
        keep(store, "raw", None, pa.table({"id": pa.array(numbers, pa.int64())}))
        for pipeline in (docs, below):
            (stage,) = pipeline.plan(store=vd.FragmentStore(root=store.root.url)).stages
            assert stage.fragments == computed
            compute(pipeline, store)
            assert ids(store, pipeline.name) == sorted(numbers)
