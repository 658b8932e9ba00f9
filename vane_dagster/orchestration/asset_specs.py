"""Stages and the source as Dagster's asset specs."""

from __future__ import annotations

from typing import Any

import dagster as dg

from vane_dagster.pipeline.options import AssetOptions
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import SOURCE, StageSpec
from vane_dagster.planning.definition import stage_definition


def stage_key(pipeline: Pipeline, name: str) -> dg.AssetKey:
    """The asset of a stage; for the source, of what writes it or of what observes it."""
    if name == SOURCE and pipeline.source.asset:
        return dg.AssetKey(pipeline.source.asset.split("/"))
    return dg.AssetKey([pipeline.name, name])


def stage_spec(pipeline: Pipeline, spec: StageSpec) -> dg.AssetSpec:
    """A stage as a Dagster asset, whose rows others get by the store as its IO manager."""
    return dg.AssetSpec(
        key=stage_key(pipeline, spec.name),
        deps=[*(stage_key(pipeline, name) for name in spec.upstream), *spec.asset.deps],
        code_version=code_version(stage_definition(pipeline, spec)),
        **_common(pipeline, spec.asset, spec.kind, spec.description),
    ).with_io_manager_key("store")


def source_spec(pipeline: Pipeline, options: AssetOptions) -> dg.AssetSpec:
    """The source as a Dagster asset that is observed."""
    source = pipeline.source
    return dg.AssetSpec(
        key=stage_key(pipeline, SOURCE),
        deps=list(options.deps),
        **_common(pipeline, options, source.kind, source.describe()),
    )


def code_version(definition: str) -> str:
    """A stage's code version in Dagster, by its definition."""
    return definition[:16]


def _common(
    pipeline: Pipeline, options: AssetOptions, kind: str, description: str | None
) -> dict[str, Any]:
    return {
        "description": options.description or description,
        "group_name": options.group_name or pipeline.group_name,
        "owners": list(options.owners),
        "tags": dict(options.tags),
        "kinds": {kind, *options.kinds},
        "metadata": dict(options.metadata),
        "automation_condition": options.automation_condition,
        "freshness_policy": options.freshness_policy,
        "partitions_def": pipeline.partitions_def,
    }
