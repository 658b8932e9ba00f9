"""What would stop a planned run, or hold it up, as far as that is known before it begins."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vane_dagster._texts import EqualErrors, amount, count, in_partition
from vane_dagster.checks.base import Check
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

_FRAGMENTS = "fragments that have not started when it is used up fail"
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

    `capacity` is None if the compute resource would have to be started first. `running` are the
    identities of the pools that have workers.
    """
    yield from _budgets(plan, forecast)
    needed = plan.needed()
    for batches in stage_batches(plan.pipeline, store, needed):
        batches.read()
        if in_flight := batches.in_flight:
            requests = count(sum(batch.requests for batch in in_flight), "request")
            yield f"{requests} of {batches.stage!r} are in flight in batches and already paid for"
    if capacity is not None:
        yield from placed(plan.pipeline, needed, capacity, store)[1]
    for server in declared_servers(plan.pipeline, needed):
        try:
            identity = server.identity()
        except VaneError as error:
            yield str(error)
            continue
        if identity not in running:
            unknown = "" if capacity is not None else ", unless it already runs"
            yield f"{server.label} must start first{unknown}"


def failed_checks(plan: RunPlan, store: Store) -> Iterator[str]:
    """Yield the blocking checks of stored stages that withhold those downstream, or may do so."""
    failed, pipeline = EqualErrors(), plan.pipeline
    declared = {
        stage.name: [c for c in stage.spec.asset.checks if isinstance(c, Check) and c.blocking]
        for stage in pipeline
    }

    def upstream(partition: PartitionPlan) -> list[tuple[str, Manifest]]:
        """The stored stages that are read by those that are due, or that declare such checks."""
        stages = partition.stages.items()
        edges = ((u, each.done) for stage, each in stages for u in pipeline[stage].spec.upstream)
        read = dict.fromkeys(u for u, done in edges if not done or declared.get(u))
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
                    where = f"blocking check {result.name!r} of {stage!r}"
                    text = (
                        f"{where}{in_partition(partition.key)} failed: {result.description}. "
                        "Its downstream stages will not be committed"
                    )
                    failed.add(partition.key, text, where)
            for check in (each for each in declared[stage] if each.name not in results):
                where = f"the blocking check {check.name!r} of {stage!r}"
                text = f"{where}{in_partition(partition.key)} has no stored result"
                failed.add(partition.key, f"{text}; the run evaluates it", where)
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
                    f"{stage.stage}: its {name} is {amount(most, 6)}, but the run may use "
                    f"{between(expected)}; {_ONE_FRAGMENT if stage.fragments == 1 else _FRAGMENTS}"
                )
