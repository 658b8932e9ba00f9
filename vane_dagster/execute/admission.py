"""Which pools fit on a cluster together: pure arithmetic over resource bundles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vane_dagster.errors import ComputeError
from vane_dagster.execute.backend import Capacity
from vane_dagster.execute.work import PoolSpec

Bundle = Mapping[str, float]
_SLACK = 1e-6


def fits(nodes: Sequence[Bundle], bundles: Iterable[Bundle]) -> bool:
    """Whether bundles can be placed on nodes, the largest first, each where there is room."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=_size, reverse=True):
        if not bundle:
            continue
        home = next((node for node in free if _has_room(node, bundle)), None)
        if home is None:
            return False
        for name, amount in bundle.items():
            home[name] -= amount
    return True


def _size(bundle: Bundle) -> tuple[float, ...]:
    return (bundle.get("GPU", 0.0), bundle.get("CPU", 0.0), sum(bundle.values()))


def _has_room(node: Bundle, bundle: Bundle) -> bool:
    return all(node.get(name, 0.0) + _SLACK >= amount for name, amount in bundle.items())


def check_can_fit(capacity: Capacity, pool: PoolSpec) -> None:
    """Raises ComputeError if a pool's least workers do not fit on an otherwise empty cluster."""
    least = pool.workers[0]
    if fits(capacity.nodes, [pool.bundle] * least):
        return
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in pool.bundle.items())
    has = ", ".join(f"{capacity.total(name):g} {name}" for name in pool.bundle)
    fix = "Lower concurrency or what a worker reserves, or use a larger cluster"
    if least > 1 and fits(capacity.nodes, [pool.bundle]):
        fix = f"Declare concurrency=(1, {pool.workers[1]}) to take what there is, or {fix.lower()}"
    raise ComputeError(
        f"{pool.label}: {least} workers of {wanted} each were asked for; the cluster has {has} on "
        f"{len(capacity.nodes)} node{'s' * (len(capacity.nodes) != 1)}. {fix}"
    )


def pack_waves(
    capacity: Capacity,
    stages: Sequence[str],
    upstream: Mapping[str, Sequence[str]],
    pools: Mapping[str, PoolSpec],
) -> list[list[str]]:
    """Puts stages into waves: in each, all pools fit on the cluster together.

    Args:
        capacity: What the cluster has.
        stages: Stages to compute, upstream first.
        upstream: Each stage's upstream; those not in `stages` are read from parts.
        pools: The pool of each stage that has one.

    Returns:
        The stages of each wave, a stage never in an earlier wave than its upstream.

    Raises:
        ComputeError: If a pool does not fit even alone.
    """
    waves: list[list[str]] = []
    claimed: list[dict[str, PoolSpec]] = []
    placed: dict[str, int] = {}
    for stage in stages:
        earliest = max((placed[u] for u in upstream[stage] if u in placed), default=0)
        pool = pools.get(stage)
        if pool is not None:
            check_can_fit(capacity, pool)
        index = earliest
        while (
            pool is not None and index < len(waves) and not _joins(capacity, claimed[index], pool)
        ):
            index += 1
        while index >= len(waves):
            waves.append([])
            claimed.append({})
        waves[index].append(stage)
        placed[stage] = index
        if pool is not None:
            claimed[index][pool.identity] = _larger(claimed[index].get(pool.identity), pool)
    return waves


def _joins(capacity: Capacity, claimed: Mapping[str, PoolSpec], pool: PoolSpec) -> bool:
    merged = {**claimed, pool.identity: _larger(claimed.get(pool.identity), pool)}
    return fits(capacity.nodes, [p.bundle for p in merged.values() for _ in range(p.workers[0])])


def _larger(one: PoolSpec | None, other: PoolSpec) -> PoolSpec:
    return other if one is None or other.workers > one.workers else one
