"""A pipeline as one Dagster `multi_asset`, and its source as an observable asset.

Dagster inspects the annotations of the steps at runtime, so this module does not postpone their
evaluation.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from vane_dagster._secrets import errors_masked, without_secrets
from vane_dagster.errors import DefinitionError, VaneError
from vane_dagster.orchestration.asset_specs import source_spec, stage_key, stage_spec
from vane_dagster.orchestration.check_events import (
    CheckLog,
    check_specs,
    evaluate_alone,
    make_check_runner,
)
from vane_dagster.orchestration.event_log import planned_checks_dropped
from vane_dagster.orchestration.io_manager import FragmentStore
from vane_dagster.orchestration.reporting import LOGGED_ALREADY, RunReport
from vane_dagster.orchestration.reproducible import ReproducibilityRunner
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.run import run_pipeline
from vane_dagster.orchestration.source_asset import SourceLog, observe
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.records import Asset
from vane_dagster.pipeline.specs import SOURCE


class RunOptions(dg.Config):
    """Run config of a pipeline, editable in Dagster's launchpad."""

    force: bool = Field(
        default=False, description="Compute the selected stages again, whatever the store holds."
    )
    retry_quarantined: bool = Field(
        default=False,
        description="Retry the rows that failed, and recompute their downstream rows.",
    )
    reproduce_partitions: list[str] = Field(
        default_factory=list,
        description=(
            "Partitions from which a Reproducible check recomputes rows. Default: those of the "
            "run, or four at random."
        ),
    )
    reproduce_rows: int | None = Field(
        default=None,
        ge=1,
        description="Rows of each partition that a Reproducible check computes again.",
    )
    reproduce_seed: int | None = Field(
        default=None,
        ge=0,
        description="Chooses these rows, as a former evaluation tells. Default: others each time.",
    )


def build_assets(pipeline: Pipeline) -> dg.AssetsDefinition:
    """Implement `Pipeline.build_assets`."""
    if not pipeline.stages:
        raise DefinitionError(f"pipeline {pipeline.name!r} has no stages; add one to it")
    pipeline = pipeline._snapshot()
    policy = pipeline.backfill_policy
    if policy is None and pipeline.partitions_def is not None:
        policy = dg.BackfillPolicy.single_run()

    @dg.multi_asset(
        name=f"{pipeline.name}_pipeline",
        specs=[stage_spec(pipeline, stage.spec) for stage in pipeline],
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
        with errors_masked(), planned_checks_dropped(context):
            yield from materialized(context, config, compute, store)

    def materialized(
        context: dg.AssetExecutionContext,
        config: RunOptions,
        compute: Compute,
        store: FragmentStore,
    ) -> Iterator[Any]:
        opened = store.open()
        check_runner = make_check_runner(context, pipeline, opened)
        checks = CheckLog(context, pipeline)
        try:
            evaluate_alone(context, checks, pipeline, opened, check_runner)
            ReproducibilityRunner(
                context,
                pipeline,
                opened,
                compute,
                check=lambda: _check_is_wanted(context),
                priority=_priority(context.run),
                partitions=config.reproduce_partitions,
                rows=config.reproduce_rows,
                seed=config.reproduce_seed,
            ).evaluate(checks, check_runner)
        except VaneError as error:
            raise dg.Failure(description=str(error)) from error.__cause__
        selected = {key.path[-1] for key in context.selected_asset_keys}
        if not selected:
            yield from checks.outputs()
            return
        partitions = _partitions(context, pipeline)
        report = RunReport(context, checks, pipeline, opened, partitions, check_runner)
        try:
            with report:
                run_pipeline(
                    pipeline,
                    selected,
                    partitions,
                    compute,
                    opened,
                    context.run.run_id,
                    listen=report.listen,
                    flush=report.flush,
                    log=context.log.info,
                    check=lambda: _check_is_wanted(context),
                    check_runner=check_runner,
                    force=config.force,
                    retry_quarantined=config.retry_quarantined,
                    priority=_priority(context.run),
                )
        except VaneError as error:
            raise dg.Failure(description=str(error)) from error.__cause__
        yield from report.results()

    return materialize


def build_source(pipeline: Pipeline, options: Asset) -> dg.AssetsDefinition:
    """Implement `Pipeline.build_source`."""
    key = stage_key(pipeline, SOURCE)

    def observe_source(context: dg.AssetExecutionContext) -> Iterator[Any]:
        partitions: Sequence[str | None]
        if pipeline.partitions_def is None:
            partitions = [None]
        elif context.has_partition_key or context.has_partition_key_range:
            partitions = list(context.partition_keys)
        else:
            partitions = pipeline.partitions_def.get_partition_keys(
                dynamic_partitions_store=context.instance
            )
        log = SourceLog(context, pipeline, partitions)
        try:
            changed = observe(pipeline, partitions, log)
        except VaneError as error:
            raise dg.Failure(description=str(error)) from without_secrets(error).__cause__
        context.log.info(f"{changed} of {len(partitions)} partitions have changed")
        yield dg.ObserveResult(asset_key=key, metadata=LOGGED_ALREADY)

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


def _partitions(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Sequence[str | None]:
    """Return the run's partitions; a run over a range has no `partition_key`."""
    if pipeline.partitions_def is None:
        return [None]
    if not (context.has_partition_key or context.has_partition_key_range):
        raise dg.Failure(
            f"pipeline {pipeline.name!r} is partitioned, and the run names no partition; choose "
            "one or a range in Dagster's UI, or give materialize(partition_key=...)"
        )
    return list(context.partition_keys)


def _priority(run: dg.DagsterRun) -> int:
    """Return the run's `dagster/priority` tag, which also orders Dagster's run queue; default 0."""
    try:
        return int(run.tags.get("dagster/priority", 0))
    except ValueError:
        return 0


def _check_is_wanted(context: dg.AssetExecutionContext) -> None:
    """Stop a step after its run has finished, because the run was killed or force-terminated.

    The step is a separate process. Without this check it would keep computing alongside the run
    that replaces it.
    """
    try:
        run = context.instance.get_run_by_id(context.run.run_id)
    except Exception:  # the database is temporarily unavailable
        return
    if run is not None and run.is_finished:
        raise dg.Failure(
            f"run {run.run_id} is over, {run.status.value}, so its step stops. Finished parts are "
            "kept; start it again to continue from there",
            allow_retries=False,
        )
