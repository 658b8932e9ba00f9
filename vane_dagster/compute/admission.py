"""Which pools fit on a cluster together, and the packing of stages into waves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vane_dagster._texts import resource
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.placement import Bundle, fits
from vane_dagster.errors import ComputeError
from vane_dagster.worker.pools import PoolSpec, shares


def unsatisfiable(
    capacity: Capacity,
    label: str,
    workers: tuple[int, int],
    bundle: Bundle,
    is_server: bool = False,
    ranks: int = 1,
) -> str | None:
    """Return why a pool's minimum workers do not fit on an otherwise empty cluster, or None.

    If an autoscaler may add nodes, nothing is checked: it does not report which.
    """
    option, worker = ("replicas", "replica") if is_server else ("concurrency", "worker")
    least, split = workers[0], shares(bundle, ranks)
    if ranks > 1 and not capacity.is_cluster:
        return f"{label} has ranks on Ray and cannot run in subprocesses; compute on a cluster"
    if capacity.adds_nodes or fits(capacity.nodes, split * least):
        return None
    wanted = _amounts(bundle)
    has = _amounts({name: capacity.total(name) for name in bundle})
    where, larger = f"the cluster has {has} (nodes: {len(capacity.nodes)})", "cluster"
    if len(capacity.nodes) > 1:
        most = {name: max(node.get(name, 0.0) for node in capacity.nodes) for name in bundle}
        where = f"{where[:-1]}, each with at most {_amounts(most)})"
    if not capacity.is_cluster:
        where, larger = f"this machine has {has} for subprocesses", "machine"
    fix = f"Lower {option} or the resources of a {worker}, or use a larger {larger}"
    if least > 1 and fits(capacity.nodes, split):
        fix = f"Declare {option}=(1, {workers[1]}) to use what is available, or {fix.lower()}"
    workers_wanted = (
        f"{least} {worker}s of {wanted} each" if least > 1 else f"a {worker} of {wanted}"
    )
    return f"{label} asks for {workers_wanted}; {where}. {fix}"


def _amounts(bundle: Bundle) -> str:
    return ", ".join(resource(name, amount) for name, amount in bundle.items())


def plan_waves(
    capacity: Capacity,
    stages: Sequence[str],
    upstream: Mapping[str, Sequence[str]],
    pools: Mapping[str, PoolSpec],
    servers: Mapping[str, PoolSpec] | None = None,
) -> list[list[str]]:
    """Assign stages to waves such that all pools of a wave fit together where they belong."""
    waves: list[list[str]] = []
    claimed: list[dict[str, PoolSpec]] = []
    placed: dict[str, int] = {}
    for stage in stages:
        earliest = max((placed[u] for u in upstream[stage] if u in placed), default=0)
        own = [pools[stage]] if stage in pools else []
        own += [(servers or {})[identity] for pool in own for identity in pool.uses.values()]
        _check_can_fit_together(capacity, stage, own)
        index = earliest
        while own and index < len(waves) and not _join(capacity, claimed[index], own):
            index += 1
        while index >= len(waves):
            waves.append([])
            claimed.append({})
        waves[index].append(stage)
        placed[stage] = index
        claimed[index] = largest([*claimed[index].values(), *own])
    return waves


def _check_can_fit_together(capacity: Capacity, stage: str, own: Sequence[PoolSpec]) -> None:
    if capacity.adds_nodes or _join(capacity, {}, own):
        return
    wanted = (f"{p.workers[0]} of {_amounts(p.bundle)} for {p.label}" for p in own if p.bundle)
    raise ComputeError(
        f"stage {stage!r} needs {' and '.join(wanted)} at the same time, which do not fit "
        "together. Lower concurrency, replicas or what each reserves, or use a larger cluster"
    )


def _join(capacity: Capacity, claimed: Mapping[str, PoolSpec], own: Sequence[PoolSpec]) -> bool:
    bundles: dict[bool, list[Bundle]] = {}
    for each in largest([*claimed.values(), *own]).values():
        bundles.setdefault(each.on_driver, []).extend(each.shares * each.workers[0])
    return all(fits(capacity.of(place).nodes, asked) for place, asked in bundles.items())


def largest(pools: Iterable[PoolSpec]) -> dict[str, PoolSpec]:
    """Return pools by identity, of equal ones the largest, with the most workers of each."""
    pools_by_identity: dict[str, PoolSpec] = {}
    for pool in sorted(pools, key=lambda pool: pool.workers):
        least, most = zip(pool.workers, pools_by_identity.get(pool.identity, pool).workers)
        pools_by_identity[pool.identity] = replace(pool, workers=(max(least), max(most)))
    return pools_by_identity
