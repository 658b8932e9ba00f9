"""A pipeline as one Dagster `multi_asset`, and its source as an observable asset.

Declaring imports little: what a step executes is in `steps`, and imported by the step.

Dagster inspects the annotations of the steps at runtime, so this module does not postpone their
evaluation.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.modules import files_read_once
from vane_dagster.orchestration.asset_specs import check_specs, source_spec, stage_spec
from vane_dagster.orchestration.io_manager import FragmentStore
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.pipeline.pipeline import Pipeline, Stage
from vane_dagster.pipeline.records import Asset

_SENSOR_SECONDS = 300
PIPELINES: dict[str, Pipeline] = {}
"""The pipelines whose assets were built in this process, by name."""


def build_assets(
    pipeline: Pipeline,
    spec_of: Callable[[Stage], dg.AssetSpec] | None = None,
    execute: Callable[..., Iterator[Any]] | None = None,
) -> dg.AssetsDefinition:
    """Implement `Pipeline.build_assets`.

    Args:
        pipeline: The pipeline.
        spec_of: Returns the asset spec of a stage, in place of `stage_spec`.
        execute: Executes a step, in place of `materialize_step`, which has the same parameters.
    """
    if not pipeline.stages:
        raise DefinitionError(f"pipeline {pipeline.name!r} has no stages; add one to it")
    PIPELINES[pipeline.name] = pipeline = pipeline._snapshot()
    policy = pipeline.backfill_policy
    if policy is None and pipeline.partitions_def is not None:
        policy = dg.BackfillPolicy.single_run()
    with files_read_once():
        specs = [_spec(stage, spec_of) for stage in pipeline]

    @dg.multi_asset(
        name=f"{pipeline.name}_pipeline",
        specs=specs,
        partitions_def=pipeline.partitions_def,
        backfill_policy=policy,
        check_specs=check_specs(pipeline),
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
        from vane_dagster.orchestration.steps import materialize_step  # what only a step needs

        yield from (execute or materialize_step)(context, pipeline, config, compute, store)

    return materialize


def _spec(stage: Stage, spec_of: Callable[[Stage], dg.AssetSpec] | None) -> dg.AssetSpec:
    """Return a stage's asset spec, with the store as its IO manager."""
    own = stage_spec(stage.pipeline, stage.spec)
    spec = spec_of(stage) if spec_of else own
    location = stage.pipeline._location(stage.name)
    for name in ("key", "deps", "code_version", "partitions_def"):
        if (changed := getattr(spec, name)) != (expected := getattr(own, name)):
            raise DefinitionError(
                f"{location}: its asset has {name}={changed!r}; expected {expected!r}, which "
                "follows from the pipeline: leave it out"
            )
    return spec.with_io_manager_key("store")


def build_source(pipeline: Pipeline, options: Asset) -> dg.AssetsDefinition:
    """Implement `Pipeline.build_source`."""

    def observe_source(context: dg.AssetExecutionContext) -> Iterator[Any]:
        from vane_dagster.orchestration.steps import observe_step

        yield from observe_step(context, pipeline)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        decorate = dg.multi_observable_source_asset(
            name=f"{pipeline.name}_source",
            specs=[source_spec(pipeline, options)],
            partitions_def=pipeline.partitions_def,
        )
    made = decorate(observe_source)
    assert isinstance(made, dg.AssetsDefinition)
    return made


def uses_batches(pipeline: Pipeline) -> bool:
    """Return whether a stage asks a provider in batches."""
    return any(stage.spec.runs_udf and stage.spec.in_batches for stage in pipeline)


def build_batch_sensor(pipeline: Pipeline) -> dg.SensorDefinition:
    """Implement `Pipeline.build_batch_sensor`."""
    if not uses_batches(pipeline):
        raise DefinitionError(
            f"pipeline {pipeline.name!r}: no stage uses batches; give a prompt "
            'vd.Model(..., mode="batch")'
        )

    @dg.sensor(
        name=f"{pipeline.name}_batches",
        asset_selection=[stage.key for stage in pipeline],
        minimum_interval_seconds=_SENSOR_SECONDS,
    )
    def sensor(
        context: dg.SensorEvaluationContext, store: dg.ResourceParam[FragmentStore]
    ) -> dg.SensorResult:
        from vane_dagster.orchestration.batch_runs import look_at_batches

        return look_at_batches(context, pipeline, store)

    return sensor


class PlanOptions(dg.Config):
    """Run config of a job that plans a pipeline."""

    partitions: str | None = Field(
        default=None, description='A partition, "first..last", or several by commas. Default: all.'
    )
    select: str | None = Field(
        default=None,
        description='Stages, such as "clean,embedding+" with those downstream. Default: all.',
    )
    rows: bool = Field(
        default=False, description="Read the inputs of changed fragments, and count rows by keys."
    )


def build_plan_job(pipeline: Pipeline) -> dg.JobDefinition:
    """Implement `Pipeline.build_plan_job`."""

    @dg.op(
        name=f"{pipeline.name}_plan_step",
        description="What a run would compute, why, and what it would cost.",
    )
    def plan(
        context: dg.OpExecutionContext,
        config: PlanOptions,
        store: dg.ResourceParam[FragmentStore],
    ) -> None:
        from vane_dagster.orchestration.forecasts import make_forecast

        partitions = config.partitions.split(",") if config.partitions else None
        forecast = make_forecast(pipeline, partitions, config.select, store, rows=config.rows)
        context.log.info(str(forecast))
        text = dg.MetadataValue.md(f"~~~~~~~~\n{forecast}\n~~~~~~~~")
        context.add_output_metadata({"plan": text, "up_to_date": forecast.is_up_to_date})

    # In a repository, an op and a job cannot have the same name.
    @dg.job(name=f"{pipeline.name}_plan", description=plan.description)
    def job() -> None:
        plan()

    return job
