"""A pipeline as one Dagster `multi_asset`.

Dagster reads the annotations of the step as they are, so they must not be postponed here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.declare.stage import SOURCE, MapBatchesSpec, StageSpec
from vane_dagster.errors import DefinitionError, VaneError
from vane_dagster.orchestrate.reporting import RunReport
from vane_dagster.orchestrate.resources import Compute, FragmentStore
from vane_dagster.orchestrate.runner import run_pipeline
from vane_dagster.plan.definition import stage_definition


class RunOptions(dg.Config):
    """What can be set for a run of a pipeline in Dagster's launchpad."""

    force: bool = Field(
        default=False, description="Compute the selected stages again, whatever the store holds."
    )


def build_assets(pipeline: Pipeline) -> dg.AssetsDefinition:
    """See `Pipeline.build_assets`."""
    if not pipeline.stages:
        raise DefinitionError(f"pipeline {pipeline.name!r} has no stages; add one to it")
    policy = pipeline.backfill_policy
    if policy is None and pipeline.partitions_def is not None:
        policy = dg.BackfillPolicy.single_run()

    @dg.multi_asset(
        name=f"{pipeline.name}_pipeline",
        specs=[asset_spec(pipeline, stage.spec) for stage in pipeline],
        partitions_def=pipeline.partitions_def,
        backfill_policy=policy,
        can_subset=True,
        pool=pipeline.pool,
        retry_policy=pipeline.retry_policy,
        op_tags=pipeline.op_tags or None,
    )
    def materialize(
        context: dg.AssetExecutionContext,
        config: RunOptions,
        compute: dg.ResourceParam[Compute],
        store: dg.ResourceParam[FragmentStore],
    ) -> Iterator[Any]:
        opened = store.open()
        selected = {key.path[-1] for key in context.selected_asset_keys}
        partitions = _partitions(context, pipeline)
        report = RunReport(context, pipeline, opened, partitions)
        try:
            run_pipeline(
                pipeline,
                selected,
                partitions,
                compute,
                opened,
                context.run.run_id,
                listen=report.listen,
                log=context.log.info,
                force=config.force,
            )
        except VaneError as error:
            raise dg.Failure(description=str(error)) from error
        finally:
            report.close()
        yield from report.results()

    return materialize


def _partitions(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Sequence[str | None]:
    """The partitions of a run, of which a range has no `partition_key`."""
    if pipeline.partitions_def is None:
        return [None]
    if not (context.has_partition_key or context.has_partition_key_range):
        raise dg.Failure(
            f"pipeline {pipeline.name!r} is partitioned, and the run names no partition; choose "
            "one or a range in Dagster's UI, or give materialize(partition_key=...)"
        )
    return list(context.partition_keys)


def asset_spec(pipeline: Pipeline, spec: StageSpec) -> dg.AssetSpec:
    """A stage as a Dagster asset."""
    options = spec.asset
    own = [_upstream_key(pipeline, name) for name in spec.upstream]
    return dg.AssetSpec(
        key=[pipeline.name, spec.name],
        deps=[*own, *options.deps],
        description=options.description or _description(spec),
        group_name=options.group_name or pipeline.group_name,
        owners=list(options.owners),
        tags=dict(options.tags),
        kinds={spec.kind, *options.kinds},
        metadata=dict(options.metadata),
        code_version=stage_definition(pipeline, spec)[:16],
        automation_condition=options.automation_condition,
        freshness_policy=options.freshness_policy,
        partitions_def=pipeline.partitions_def,
    )


def _upstream_key(pipeline: Pipeline, name: str) -> dg.AssetKey:
    if name != SOURCE:
        return dg.AssetKey([pipeline.name, name])
    if pipeline.source.asset:
        return dg.AssetKey(pipeline.source.asset.split("/"))
    return dg.AssetKey([pipeline.name, SOURCE])


def _description(spec: StageSpec) -> str | None:
    """The first paragraph of the user's own docstring."""
    if not isinstance(spec, MapBatchesSpec) or not spec.udf.target.__doc__:
        return None
    return spec.udf.target.__doc__.strip().split("\n\n")[0]
