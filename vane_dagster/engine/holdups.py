"""What would stop a planned run, or hold it up, as far as that is known before it begins."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vane_dagster._texts import EqualErrors, amount, count, in_partition
from vane_dagster.compute.api import Capacity
from vane_dagster.engine.check_runner import results_for
from vane_dagster.engine.preflight import placed
from vane_dagster.engine.server_pools import declared_servers
from vane_dagster.engine.stage_batches import stage_batches
from vane_dagster.errors import VaneError
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.forecast import Forecast, between
from vane_dagster.planning.plan import PartitionPlan, RunPlan
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.store import Store

_FRAGMENTS = "fragments that have not begun when it is used up fail"
_ONE_FRAGMENT = (
    "the budget cannot stop the only fragment to compute; give the run a max_cost in its config, "
    "or the pipeline a smaller fragment_rows="
)


def holdups(
    plan: RunPlan,
    forecast: Forecast,
    store: Store,
    capacity: Capacity | None,
    running: Collection[str],
) -> Iterator[str]:
    """Yield what would stop a run by a plan, or hold it up.

    Args:
        plan: The plan.
        forecast: Its forecast.
        store: The store.
        capacity: Resources of the compute resource; None if it would have to be started first.
        running: Identities of the pools that have workers.
    """
    yield from _failed_checks(plan, store)
    yield from _budgets(plan, forecast)
    needed = plan.needed()
    for batches in stage_batches(plan.pipeline, store, needed):
        batches.read()
        if in_flight := batches.in_flight:
            requests = count(sum(batch.requests for batch in in_flight), "request")
            yield f"{requests} of {batches.stage!r} are in flight in batches, and paid for"
    if capacity is not None:
        yield from placed(plan.pipeline, needed, capacity, store)[1]
    for server in declared_servers(plan.pipeline, needed):
        try:
            identity = server.identity()
        except VaneError as error:
            yield str(error)
            continue
        if identity not in running:
            unknown = "" if capacity is not None else ", unless it is running"
            yield f"{server.label} has to start{unknown}"


def _failed_checks(plan: RunPlan, store: Store) -> Iterator[str]:
    """Yield the failed blocking checks of stored stages that withhold those downstream."""
    failed, pipeline = EqualErrors(), plan.pipeline

    def upstream(partition: PartitionPlan) -> list[tuple[str, Manifest]]:
        """The stored stages that are read by those that are not up to date."""
        due = [stage for stage, each in partition.stages.items() if not each.done]
        read = dict.fromkeys(u for stage in due for u in pipeline[stage].spec.upstream)
        blocking = []
        for stage in read:
            if stage in partition.inputs:
                blocking.append((stage, partition.inputs[stage]))
            elif stage != SOURCE and (name := partition.stages[stage].done):
                blocking.append((stage, store.read(pipeline.name, stage, partition.key, name)))
        return blocking

    for partition, manifests in zip(plan.partitions, in_threads(upstream, plan.partitions)):
        for stage, manifest in manifests:
            results = results_for(pipeline._checks_of(stage), manifest)
            for result in results.values():
                if result.blocks:
                    where = f"the blocking check {result.name!r} of {stage!r}"
                    text = (
                        f"{where}{in_partition(partition.key)} failed: {result.description}. "
                        "Stages downstream are not committed there"
                    )
                    failed.add(partition.key, text, where)
    yield from failed.texts()


def _budgets(plan: RunPlan, forecast: Forecast) -> Iterator[str]:
    """Yield the budgets of stages that the run may exhaust."""
    for stage in forecast.stages:
        usage = plan.pipeline[stage.stage].spec.usage
        if usage is None:
            continue
        for name, most, expected in (
            ("token_budget", usage.token_budget, stage.tokens),
            ("cost_budget", usage.cost_budget, stage.token_cost),
        ):
            if most is not None and expected and expected[1] > most:
                yield (
                    f"{stage.stage}: its {name} is {amount(most, 6)}, and the run would use "
                    f"{between(expected)}; {_ONE_FRAGMENT if stage.fragments == 1 else _FRAGMENTS}"
                )
