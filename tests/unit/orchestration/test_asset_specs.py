"""What a stage takes of an asset's spec, and what `FragmentStore` and resources refuse."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.orchestration.asset_rows import keep_rows, load_rows


def plain(batch):
    """Doubles."""
    return batch


def test_a_stage_takes_what_an_asset_spec_takes(tmp_path):
    given = {"group_name": "texts", "pool": "one_at_a_time", "op_tags": {"team": "texts"}}
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path)), id="id", **given)
    hour = datetime.timedelta(hours=1)
    declared = {
        "description": "Clean.",
        "owners": ["team:data"],
        "tags": {"tier": "gold"},
        "kinds": {"duckdb"},
        "metadata": {"notebook": "x"},
        "automation_condition": dg.AutomationCondition.eager(),
        "freshness_policy": dg.FreshnessPolicy.cron("0 9 * * *", lower_bound_delta=hour),
    }
    clean = docs.project("clean", ["id"], asset=vd.Asset(**declared, deps=["a_table"]))
    other = vd.Asset(group_name="other")
    doubled = clean.map_batches("doubled", plain, schema={"x": "BIGINT"}, asset=other)
    clean.map_batches("sized", plain, schema={"x": "BIGINT"})
    assets = docs.build_assets()
    specs = {spec.key.path[-1]: spec for spec in assets.specs}
    spec = specs["clean"]
    for name in ("description", "owners", "metadata", "automation_condition", "freshness_policy"):
        found = getattr(spec, name)
        assert (declared[name] if name != "metadata" else {**found, "notebook": "x"}) == found
    assert spec.tags["tier"] == "gold"
    assert {"duckdb", "project"} <= spec.kinds
    assert {dep.asset_key.to_user_string() for dep in spec.deps} == {"a_table", "docs/source"}
    assert {dep.asset_key for dep in specs["doubled"].deps} == {clean.key}
    (source,) = docs.build_source().specs
    assert [each.group_name for each in (source, spec, specs["doubled"])] == ["texts"] * 2 + [
        "other"
    ]
    assert specs["doubled"].description == "Doubles."
    assert len({each.code_version for each in specs.values()}) == 2, "sized is doubled but in name"
    assert doubled.key == dg.AssetKey(["docs", "doubled"])
    assert assets.op.pool == "one_at_a_time"
    assert assets.op.tags["team"] == "texts"


def test_a_condition_on_a_partitioned_source_is_a_warning(tmp_path):
    nightly = vd.Asset(automation_condition=dg.AutomationCondition.on_cron("0 0 * * *"))
    days = dg.DailyPartitionsDefinition("2026-01-01")
    vd.Pipeline("docs", source=vd.parquet(str(tmp_path)), id="id").build_source(nightly)
    source = vd.parquet(f"{tmp_path}/{{partition_key}}")
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=days)
    docs.build_source(vd.Asset())
    with pytest.warns(match="'docs/source': automation_condition") as warned:
        docs.build_source(nightly)
    assert [each.filename for each in warned] == [__file__]


ROWS = pa.table({"id": [1]})
A_DICT = "; expected a dict of partition key to rows, of 'a', 'b', or give the asset backfill_polic"


def context(annotation: Any = Any, keys: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        name="raw",
        dagster_type=SimpleNamespace(typing_type=annotation),
        asset_key=dg.AssetKey(["Raw", "raw"]),
        run_id="run",
        definition_metadata={},
        has_asset_partitions=bool(keys),
        asset_partition_keys=keys,
        asset_partitions_def=dg.StaticPartitionsDefinition([*keys]),
        step_context=SimpleNamespace(instance=None),
    )


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        (None, (), "returned a builtins.NoneType; expected one of pyarrow.Table"),
        (None, (), "or nothing by a function with -> None"),
        ([1, 2], (), "asset 'Raw/raw' returned a builtins.list; expected one of pyarrow.Table"),
        ({"a": ROWS}, (), "returned a builtins.dict"),
        (ROWS, ("a", "b"), f"returned a Table{A_DICT}"),
        ({"a": ROWS, "x": ROWS}, ("a", "b"), f"returned a dict of 'a', 'x'{A_DICT}"),
    ],
)
def test_what_is_no_rows_is_not_kept(tmp_path: Path, value: Any, keys: Any, message: str) -> None:
    with pytest.raises(vd.errors.StoreError) as raised:
        keep_rows(vd.FragmentStore(root=str(tmp_path)), context(keys=keys), value)
    assert message in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_an_asset_may_return_nothing_if_it_says_so(tmp_path: Path) -> None:
    keep_rows(vd.FragmentStore(root=str(tmp_path)), context(type(None)), None)
    assert not list(tmp_path.iterdir())


def test_an_input_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(vd.errors.StoreError, match="expected one of pyarrow"):
        load_rows(vd.FragmentStore(root=str(tmp_path)), context(dict[str, pa.Table]))


@pytest.mark.parametrize(
    ("resource", "given", "line"),
    [
        (vd.RayCompute, {"adress": "auto"}, "'adress' of vd.RayCompute. Did you mean 'address'?"),
        (vd.RayCompute, {"ray_address": "auto"}, "Did you mean 'address'?"),
        (vd.LocalCluster, {"zzz": "x"}, "its options are 'num_cpus', 'num_gpus', "),
        (vd.FragmentStore, {"rot": "/x"}, "'rot' of vd.FragmentStore. Did you mean 'root'?"),
    ],
)
def test_an_unknown_argument_is_refused(resource, given, line):
    with pytest.raises(vd.errors.DefinitionError) as refused:
        resource(**given)
    assert line in str(refused.value)
