"""The forecast of a run, without a cluster and without Dagster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg

from vane_dagster._secrets import errors_masked
from vane_dagster.engine.inference import SchemaInference
from vane_dagster.errors import DefinitionError, VaneError, names
from vane_dagster.orchestration.partition_order import DagsterOrder
from vane_dagster.orchestration.read import open_store
from vane_dagster.pipeline.stage_kind import SOURCE, with_upstream
from vane_dagster.planning.forecast import Forecast, forecast
from vane_dagster.planning.plan import RunPlan
from vane_dagster.planning.planner import plan_run

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline
    from vane_dagster.storage.store import Store


def make_forecast(pipeline: Pipeline, partitions: Any, select: Any, store: Any) -> Forecast:
    """Implement `Pipeline.plan`."""
    location = f"pipeline {pipeline.name!r}: plan"
    if not pipeline.stages:
        raise DefinitionError(f"{location}: the pipeline has no stages; add one to it")
    selected = selected_stages(pipeline, select, location)
    keys = partition_keys(pipeline, partitions, location)
    opened = open_store(store, location)

    unknown: dict[str, str] = {}
    with errors_masked():
        while selected:
            try:
                found = _forecast(pipeline, selected, keys, opened)
                return replace(found, unplanned={**found.unplanned, **unknown})
            except _NotInferred as error:
                for stage in [s for s in selected if error.stage in with_upstream(pipeline, s)]:
                    unknown[f"stage {stage!r}"] = str(error)
                    selected.discard(stage)
    return Forecast(pipeline.name, [], unknown)


class _NotInferred(VaneError):
    """No run has inferred the schema of a stage."""

    def __init__(self, stage: str) -> None:
        super().__init__(
            f"the first run infers the schema of {stage!r}, so what follows is not known"
        )
        self.stage = stage


def _forecast(
    pipeline: Pipeline, selected: set[str], keys: Sequence[str | None], store: Store
) -> Forecast:
    def refuse(plan: RunPlan) -> NoReturn:
        raise _NotInferred(plan.selected[-1])

    given = (store, refuse, "plan", lambda event: None, selected, keys)
    with SchemaInference(*given, pins=False) as inference:
        resolved = inference.resolve(pipeline)
    return forecast(plan_run(resolved, selected, keys, store, keep=False), store)


def selected_stages(pipeline: Pipeline, select: Any, location: str) -> set[str]:
    """Return the stages that a selection names; "+" before or after a name adds those around it."""
    if select is None:
        return set(pipeline.stages)
    chosen: set[str] = set()
    for text in [select] if isinstance(select, str) else select:
        for each in str(text).split(","):
            name = each.strip().strip("+").removeprefix(f"{pipeline.name}/")
            if name == "*":
                return set(pipeline.stages)
            if name not in pipeline.stages:
                raise DefinitionError(
                    f"{location}: select names {name!r}; expected of {names(pipeline.stages)}, "
                    "with + before a name for the stages upstream and after it for those downstream"
                )
            chosen.add(name)
            if each.strip().startswith("+"):
                chosen |= with_upstream(pipeline, name) - {SOURCE}
            if each.strip().endswith("+"):
                chosen |= {s for s in pipeline.stages if name in with_upstream(pipeline, s)}
    return chosen


def partition_order(pipeline: Pipeline) -> DagsterOrder:
    """Return the order of partitions; those that are added at run time are Dagster's instance's."""
    definition: Any = pipeline.partitions_def
    parts = [each.partitions_def for each in getattr(definition, "partitions_defs", ())]
    is_dynamic = any(isinstance(d, dg.DynamicPartitionsDefinition) for d in (definition, *parts))
    return DagsterOrder(definition, dg.DagsterInstance.get() if is_dynamic else None)


def partition_keys(pipeline: Pipeline, partitions: Any, location: str) -> list[str | None]:
    """Return the partition keys that are asked for: one, several, "first..last", or all."""
    definition = pipeline.partitions_def
    if definition is None:
        if partitions is not None:
            raise DefinitionError(f"{location}: the pipeline has no partitions; leave them out")
        return [None]
    known = partition_order(pipeline).all()
    if partitions is None:
        return list(known)
    found: list[str | None] = []
    for text in [partitions] if isinstance(partitions, str) else partitions:
        first, dots, last = text.replace("...", "..").partition("..")  # as Dagster writes them
        edges = (first, last) if dots else (text, text)
        if unknown := [key for key in dict.fromkeys(edges) if key not in known]:
            raise DefinitionError(
                f"{location}: there is no partition {names(unknown)}; the first is {known[0]!r}, "
                f"the last {known[-1]!r}"
                if known
                else f"{location}: the pipeline has no partitions yet"
            )
        found += known[known.index(edges[0]) : known.index(edges[1]) + 1]
    return list(dict.fromkeys(found))
