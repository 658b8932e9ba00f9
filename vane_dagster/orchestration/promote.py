"""`vane-dagster store promote`: what a branch has committed becomes what is in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vane_dagster.errors import PlanError, StoreError
from vane_dagster.orchestration.forecasts import make_forecast
from vane_dagster.orchestration.io_manager import FragmentStore
from vane_dagster.orchestration.range_runs import materialize
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.orchestration.run import by_stages
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.promotion import Place, Promoted, Promotion


def promote(
    branch: FragmentStore,
    target: FragmentStore,
    name: str,
    pipeline: Pipeline | None = None,
    compute: Any = None,
) -> list[Promoted]:
    """Promote a pipeline's manifests; with its definitions, publish and report them too.

    Args:
        branch: The branch, with the other store as its fallback.
        target: The other store.
        name: The pipeline's name.
        pipeline: The pipeline as it was materialized in the branch. A run with the other store
            publishes its `write` stages and reports materializations to Dagster.
        compute: The compute resource of that run, which only reads and writes.

    Raises:
        StoreError: If another version is in force than the branch has started from.
        PlanError: If the definitions are others than those of the branch.
    """
    stages = None if pipeline is None else [*pipeline.stages]  # the branch may have former ones
    promotion = Promotion(branch.open(), target.open(), name, stages)
    if pipeline is not None:
        _require_up_to_date(branch, pipeline, promotion.places)
    promoted = list(promotion.carry_out())
    if pipeline is not None:
        _report(target, pipeline, promotion.places, compute)
    return promoted


def _require_up_to_date(branch: FragmentStore, pipeline: Pipeline, places: Sequence[Place]) -> None:
    """Refuse definitions that would compute what is promoted again."""
    for stages, keys in by_stages(places).items():
        plan = make_forecast(pipeline, None if keys == [None] else keys, stages, branch)
        if not plan.is_up_to_date:
            raise PlanError(
                f"the branch {branch.root!r} is not up to date with the definitions, and nothing "
                "was promoted. Materialize there first; stages with reuse='none' are promoted "
                f"without definitions:\n{plan}"
            )


def _report(
    target: FragmentStore, pipeline: Pipeline, places: Sequence[Place], compute: Any
) -> None:
    """Publish and report what was promoted, by a run of each range of partitions."""
    resources = {"store": target, "compute": LocalCompute() if compute is None else compute}
    for stages, keys in by_stages(places).items():
        publishing = [
            s.name for s in pipeline if s.spec.publishes and {*s.spec.upstream} & {*stages}
        ]
        for done in materialize(pipeline, (*stages, *publishing), keys, resources):
            if not done.success:
                raise StoreError(
                    f"pipeline {pipeline.name!r}: the promoted results are in force, but run "
                    f"{done.run_id} failed to publish or report them. Run the promotion again"
                )
