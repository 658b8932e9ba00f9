"""Instances that a preview uses again after an edit of their class."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from vane_dagster.events import Event, Noticed
from vane_dagster.fingerprint.portable import portable_payload
from vane_dagster.planning.definition import constructed_alike
from vane_dagster.planning.plan import RunPlan


def with_kept_instances(
    plan: RunPlan, running: Collection[str], show: Callable[[Event], None]
) -> RunPlan:
    """Return the plan of a preview that loads no model again for edits outside of constructors.

    Where no pool of the present code has workers, and one of an earlier class with the same
    constructor and arguments has, its instances are used, with the methods of the present class.
    """
    kept, pools = {}, {}
    for stage in plan.needed():
        spec = plan.pipeline[stage].spec
        if not (spec.runs_udf and spec.udf.stateful) or (own := plan.pool(spec)) in running:
            continue
        former = sorted(pool for pool in running if constructed_alike(pool, own))
        code = spec.code(plan.pipeline)
        if former and (payload := portable_payload(code.modules, spec.udf.target)) is not None:
            kept[stage], pools[stage] = payload, former[0]
            show(
                Noticed(
                    f"{stage}: {spec.udf.name} is not loaded again: an instance of its former code "
                    "has the methods of the present one. What the constructor has read or "
                    "called may differ; reload=True (--reload) constructs it anew",
                    is_problem=False,
                )
            )
    return replace(plan, kept=kept, _pools={**plan._pools, **pools})
