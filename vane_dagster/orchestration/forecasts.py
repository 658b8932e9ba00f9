"""The forecast of a run, without a cluster and without Dagster."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import list_of_names, positive
from vane_dagster._secrets import errors_masked
from vane_dagster.compute.client import running_pools
from vane_dagster.engine.inference import with_pins
from vane_dagster.errors import DefinitionError, VaneError
from vane_dagster.orchestration.partition_order import partition_keys, partition_order
from vane_dagster.orchestration.read import open_store
from vane_dagster.pipeline.stage_kind import SOURCE, with_upstream
from vane_dagster.planning.forecast import NOT_COUNTED, Forecast, Sample, forecast
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.storage.store import Store

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline


_RUN = "plan"
"""An id that no run has."""
_NO_SAMPLE = "a sample could not be computed: {}"
_ASSUMED = "stage {!r}: the run infers its schema again; the plan assumes that it stays the same"


def make_forecast(
    pipeline: Pipeline,
    partitions: Any,
    select: Any,
    store: Any,
    force: bool = False,
    retry_quarantined: bool = False,
    compute: Any = None,
    rows: bool = False,
    sample: int | None = None,
) -> Forecast:
    """Implement `Pipeline.plan`."""
    location = f"pipeline {pipeline.name!r}: plan"
    positive(location, "sample", sample)
    selected = selected_stages(pipeline, select, location)
    keys = partition_keys(pipeline, partitions, location)
    opened = open_store(store, location)
    with errors_masked():
        inferred, assumed = with_pins(pipeline, selected, opened), list[str]()
        expected = with_pins(pipeline, selected, opened, assumed.append)
        make_plan = functools.partial(
            plan_run,
            selected=selected,
            store=opened,
            force=force,
            run_id=_RUN,
            retry_quarantined=retry_quarantined,
            keep=False,
        )
        plan = make_plan(expected, partitions=keys)
        if assumed and plan.failed:
            others = make_plan(inferred, partitions=[*plan.failed])
            if others.partitions:  # what was assumed does not fit
                assumed, plan = [], make_plan(inferred, partitions=keys)
        price = None if compute is None else compute.gpu_hour_price
        counted = NOT_COUNTED
        if rows:
            from vane_dagster.engine.row_counts import count_rows  # imports what workers do

            counted = count_rows(plan, opened, _RUN, partition_order(pipeline).before)
        failed: list[str] = []
        measure = sample and functools.partial(
            _sampled, inferred, plan, opened, compute, sample, failed
        )
        forecasted = forecast(plan, opened, price, counted, measure or None)
        in_the_way = [*forecasted.holdups, *failed, *_holdups(plan, forecasted, opened, compute)]
        warnings = [*forecasted.warnings, *(_ASSUMED.format(stage) for stage in assumed)]
        return replace(forecasted, warnings=warnings, holdups=[*dict.fromkeys(in_the_way)])


def _sampled(
    pipeline: Pipeline,
    plan: RunPlan,
    store: Store,
    compute: Any,
    rows: int,
    failed: list[str],
    stages: Sequence[str],
) -> dict[str, Sample]:
    """Measure stages by the first rows of their input.

    The last stages come first: their samples measure the stages that they compute upstream, too.
    The first row is computed before the others, because first calls are slower.
    """
    from vane_dagster.orchestration.preview import previewing

    parts = defaultdict[str, list[PartInfo]](list)
    keys = [each.key for each in plan.partitions if any(each.stages[s].missing for s in stages)]
    with previewing(pipeline, plan.selected, keys, store, compute, show=lambda event: None) as (
        inference,
        loads,
    ):
        try:
            pipeline = inference.resolve(pipeline)
        except VaneError as error:
            failed.append(_NO_SAMPLE.format(error))
        inferred = {each.name for each in pipeline if each.spec.is_inferred}
        for stage in reversed(stages):
            has_schema = inferred.isdisjoint(with_upstream(pipeline, stage))
            if stage in parts or pipeline[stage].spec.publishes or not has_schema:
                continue
            try:
                first = inference.first_rows(pipeline, stage, 1, most=1)
                made = first and inference.first_rows(pipeline, stage, rows, most=1)
                if made is None:  # no row reaches the stage
                    continue
                for name in made.plan.needed():
                    parts[name] += [part.info for part in made.parts[name] if part.info.rows_in]
            except VaneError as error:
                failed.append(_NO_SAMPLE.format(error))
        return {
            stage: Sample(each, _others(inference.computed[stage], each), loads.get(stage))
            for stage, each in parts.items()
        }


def _others(computed: Sequence[Part], parts: Sequence[PartInfo]) -> list[PartInfo]:
    """Return what was computed besides some parts: first rows, and above a stage that failed."""
    return [each.info for each in computed if each.info.rows_in and each.info not in parts]


def _holdups(plan: RunPlan, forecasted: Forecast, store: Store, compute: Any) -> Iterator[str]:
    """Yield what would stop a run by a plan, or hold it up."""
    from vane_dagster.engine.holdups import failed_checks, holdups

    yield from failed_checks(plan, store)
    if not any(map(plan.due, plan.selected)):
        return
    capacity, running = None, set[str]()
    try:
        if compute is not None and (capacity := compute.running_capacity()) is not None:
            running = running_pools() if capacity.is_cluster else set()
    except VaneError as error:
        yield str(error)
    yield from holdups(plan, forecasted, store, capacity, running)


def selected_stages(pipeline: Pipeline, select: Any, location: str) -> set[str]:
    """Return the stages that a selection names; "+" before or after a name adds those around it."""
    if not pipeline.stages:
        raise DefinitionError(f"{location}: the pipeline has no stages; add one to it")
    if select is None:
        return set(pipeline.stages)
    chosen: set[str] = set()
    given = [select] if isinstance(select, str) or not isinstance(select, Collection) else [*select]
    for text in list_of_names(location, "select", given) or ():
        for each in text.split(","):
            name = each.strip().strip("+").removeprefix(f"{pipeline.name}/")
            if name == "*":
                return set(pipeline.stages)
            chosen.add(pipeline[name].name)
            if each.strip().startswith("+"):
                chosen |= with_upstream(pipeline, name) - {SOURCE}
            if each.strip().endswith("+"):
                chosen |= {s for s in pipeline.stages if name in with_upstream(pipeline, s)}
    if not chosen:
        raise DefinitionError(f"{location}: select is {select!r}, which names no stage")
    return chosen
