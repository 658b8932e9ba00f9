"""What a stage takes of an asset's spec."""

from __future__ import annotations

import datetime

import dagster as dg

import vane_dagster as vd


def test_a_stage_takes_what_an_asset_spec_takes(tmp_path):
    pipeline = vd.Pipeline(
        "docs",
        source=vd.parquet(str(tmp_path)),
        id="id",
        group_name="texts",
        pool="one_at_a_time",
        op_tags={"team": "texts"},
    )
    condition = dg.AutomationCondition.eager()
    hour = datetime.timedelta(hours=1)
    policy = dg.FreshnessPolicy.cron(deadline_cron="0 9 * * *", lower_bound_delta=hour)
    pipeline.project(
        "clean",
        ["id"],
        asset=vd.Asset(
            description="Clean.",
            owners=["team:data"],
            tags={"tier": "gold"},
            kinds={"duckdb"},
            metadata={"notebook": "x"},
            deps=["a_table"],
            automation_condition=condition,
            freshness_policy=policy,
        ),
    )

    assets = pipeline.build_assets()
    (spec,) = assets.specs

    assert spec.key == dg.AssetKey(["docs", "clean"])
    assert spec.group_name == "texts"
    (source,) = pipeline.build_source().specs
    assert source.group_name == "texts"
    assert spec.description == "Clean."
    assert list(spec.owners) == ["team:data"]
    assert spec.tags["tier"] == "gold"
    assert {"duckdb", "project"} <= spec.kinds
    assert spec.metadata["notebook"] == "x"
    assert {dep.asset_key.to_user_string() for dep in spec.deps} == {"a_table", "docs/source"}
    assert spec.automation_condition == condition
    assert spec.freshness_policy == policy
    assert spec.code_version
    assert assets.op.pool == "one_at_a_time"
    assert assets.op.tags["team"] == "texts"
