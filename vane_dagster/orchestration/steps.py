"""What the steps of a pipeline's assets execute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from vane_dagster._secrets import errors_masked, without_secrets
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.errors import DefinitionError, VaneError, names
from vane_dagster.orchestration.adopt import adopt_first
from vane_dagster.orchestration.asset_specs import stage_key
from vane_dagster.orchestration.check_events import CheckLog, run_partitions
from vane_dagster.orchestration.event_log import drop_planned_checks
from vane_dagster.orchestration.io_manager import FragmentStore
from vane_dagster.orchestration.partition_order import DagsterOrder
from vane_dagster.orchestration.reporting import LOGGED_ALREADY, RunReport
from vane_dagster.orchestration.reproducible import evaluate_alone
from vane_dagster.orchestration.resources import Compute, command_option
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.orchestration.source_asset import observe
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.sources.stored import StoredSource

_RETRY_TAG, _PARENT_TAG = "dagster/retry_number", "dagster/parent_run_id"


def materialize_step(
    context: dg.AssetExecutionContext,
    pipeline: Pipeline,
    config: RunOptions,
    compute: Compute,
    store: FragmentStore,
) -> Iterator[Any]:
    """Materialize the selected stages of a pipeline."""
    if first := config.continues or _first_attempt(context):
        config = config.model_copy(update={"continues": first})
    with errors_masked():
        drop_planned_checks(context)
        expected = {stage.key for stage in pipeline}
        if renamed := sorted(k.to_user_string() for k in context.assets_def.keys - expected):
            raise dg.Failure(
                f"pipeline {pipeline.name!r}: assets have the keys {names(renamed)}; expected "
                "the keys that build_assets() gives, under which the store keeps the rows. Leave "
                "out key_prefix, and rename the pipeline instead"
            )
        if not isinstance(compute, Compute):
            raise dg.Failure(
                f"resource 'compute' is a {type(compute).__name__}; expected vd.RayCompute(...) or "
                "vd.LocalCompute(...)",
                allow_retries=False,
            )
        if not isinstance(store, FragmentStore):
            raise dg.Failure(
                f"resource 'store' is a {type(store).__name__}; expected vd.FragmentStore(...). "
                "In a test, use dg.materialize: materialize_to_memory replaces the store",
                allow_retries=False,
            )
        _check_source(context, pipeline)
        opened = store.open()
        before = DagsterOrder(pipeline.partitions_def, context.instance).before
        run = RunContext(
            opened,
            context.run.run_id,
            CheckRunner(pipeline, opened, before, context.run.run_id),
            tick=lambda: _check_is_wanted(context),
            priority=_priority(context.run),
        )
        checks = CheckLog(context, pipeline)
        try:
            evaluate_alone(context, checks, pipeline, run, compute, config)
            selected = {key.path[-1] for key in context.selected_asset_keys}
            if not selected:
                yield from checks.outputs()
                return
            partitions = _partitions(context, pipeline)
            for adoption in adopt_first(run, pipeline, compute, config):
                context.log.info(str(adoption))
            report = RunReport(
                context, checks, pipeline, opened, partitions, command_option(compute)
            )

            def tick() -> None:
                report.flush()
                run.tick()

            with report:
                run_pipeline(
                    replace(run, listen=report.listen, tick=tick),
                    pipeline,
                    selected,
                    partitions,
                    compute,
                    config,
                )
        except VaneError as error:
            retries = not error.is_permanent
            raise dg.Failure(str(error), allow_retries=retries) from error.__cause__
        yield from report.results()


def observe_step(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Iterator[Any]:
    """Observe the source of a pipeline."""
    partitions: Sequence[str | None] = [None]
    if pipeline.partitions_def is not None:
        every = DagsterOrder(pipeline.partitions_def, context.instance).all
        partitions = run_partitions(context) or every()
    try:
        observe(context, pipeline, partitions)
    except VaneError as error:
        raise dg.Failure(description=str(error)) from without_secrets(error).__cause__
    yield dg.ObserveResult(asset_key=stage_key(pipeline, SOURCE), metadata=LOGGED_ALREADY)


def _first_attempt(context: dg.AssetExecutionContext) -> str | None:
    """Return the run of which this is an automatic retry, or a re-execution from failure.

    The root of the run is no attempt of it if it was re-executed as a whole in between.
    """
    run: dg.DagsterRun | None = context.run
    first = None
    while run is not None and (_RETRY_TAG in run.tags or run.is_resume_retry):
        first = run.tags.get(_PARENT_TAG)
        run = context.instance.get_run_by_id(first) if first else None
    return first


def _check_source(context: dg.AssetExecutionContext, pipeline: Pipeline) -> None:
    """Refuse an asset as source whose time windows are not known, and not the pipeline's."""
    key, graph = stage_key(pipeline, SOURCE), context.job_def.asset_layer.asset_graph
    source = pipeline.source
    if not isinstance(source, StoredSource) or source.partition_mapping or not graph.has(key):
        return
    own, other = pipeline.partitions_def, graph.get(key).partitions_def
    if len({getattr(each, "cron_schedule", None) for each in (own, other)} - {None}) > 1:
        raise dg.Failure(
            f"pipeline {pipeline.name!r} has partitions ({own}) unlike its source, asset "
            f"{key.to_user_string()!r} ({other}). Pass vd.stored({key.to_user_string()!r}, "
            "partitions_def=...) with the partitions of the asset; a partition then reads those "
            "that overlap with it in time",
            allow_retries=False,
        )


def _partitions(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Sequence[str | None]:
    """Return the run's partitions; a run over a range has no `partition_key`."""
    if pipeline.partitions_def is None:
        return [None]
    if (named := run_partitions(context)) is None:
        raise DefinitionError(
            f"pipeline {pipeline.name!r} is partitioned, but the run has no partition; choose a "
            "partition or a range in Dagster's UI, or pass materialize(partition_key=...)"
        )
    return named


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
