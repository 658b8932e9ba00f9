"""Dagster asset specs for stages and for the source."""

from __future__ import annotations

import warnings
from typing import Any

import dagster as dg

from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.records import Asset
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.definition import stage_definition


def stage_key(pipeline: Pipeline, name: str) -> dg.AssetKey:
    """Return the asset key of a stage, or of the source.

    An asset that writes the source gives the source its key.
    """
    if name == SOURCE and pipeline.source.asset:
        return dg.AssetKey(pipeline.source.asset.split("/"))
    return dg.AssetKey([pipeline.name, name])


def stage_spec(pipeline: Pipeline, spec: StageSpec) -> dg.AssetSpec:
    """Return a stage's asset spec."""
    return dg.AssetSpec(
        key=stage_key(pipeline, spec.name),
        deps=[*(_dep(pipeline, name) for name in spec.upstream), *spec.asset.deps],
        code_version=stage_definition(pipeline, spec)[:16],
        **_common(pipeline, spec.asset, spec.kind, spec.description),
    )


def _dep(pipeline: Pipeline, name: str) -> dg.AssetDep:
    mapping = getattr(pipeline.source, "partition_mapping", None) if name == SOURCE else None
    return dg.AssetDep(stage_key(pipeline, name), partition_mapping=mapping)


def source_spec(pipeline: Pipeline, options: Asset) -> dg.AssetSpec:
    """Return the asset spec of an observable source."""
    source = pipeline.source
    return dg.AssetSpec(
        key=stage_key(pipeline, SOURCE),
        deps=list(options.deps),
        **_common(pipeline, options, source.kind, source.describe()),
    )


def _common(
    pipeline: Pipeline, options: Asset, kind: str, description: str | None
) -> dict[str, Any]:
    return {
        "description": options.description or description,
        "group_name": options.group_name or pipeline.group_name or pipeline.name,
        "owners": list(options.owners),
        "tags": dict(options.tags),
        "kinds": {kind, *options.kinds},
        "metadata": dict(options.metadata),
        "automation_condition": options.automation_condition,
        "freshness_policy": options.freshness_policy,
        "partitions_def": pipeline.partitions_def,
    }


def check_specs(pipeline: Pipeline) -> list[dg.AssetCheckSpec]:
    """Return the check specs of all stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)  # for partitions_def
        return [
            dg.AssetCheckSpec(
                check.name,
                asset=stage_key(pipeline, stage.name),
                blocking=check.blocking,
                description=check.description,
                partitions_def=pipeline.partitions_def,
            )
            for stage in pipeline
            for check in (*pipeline._checks_of(stage.name), *pipeline._reproducible(stage.name))
        ]
