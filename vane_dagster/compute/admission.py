"""Which pools fit on a cluster together: pure arithmetic over resource bundles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from vane_dagster.compute.api import Capacity
from vane_dagster.errors import ComputeError
from vane_dagster.worker.protocol import PoolSpec

Bundle = Mapping[str, float]
_SLACK = 1e-6


class Room:
    """What is free on the nodes of a cluster.

    Bundles go to the smallest node that has room, so that the large ones stay free for large
    bundles. A share of a GPU lies on one GPU, as Ray has it.
    """

    def __init__(self, nodes: Mapping[str, Bundle]) -> None:
        """Takes the resources of each node, by its id."""
        order = sorted(
            nodes, key=lambda id: (bundle_size(nodes[id]), sorted(nodes[id].items()), id)
        )
        self._nodes = {id: nodes[id] for id in order}
        self._free = {id: dict(nodes[id]) for id in order}
        self._gpus = {id: [1.0] * int(nodes[id].get("GPU", 0)) for id in order}
        self._guests = dict.fromkeys(order, 0)

    def place(self, bundle: Bundle) -> str | None:
        """Takes room for a bundle; gives the node, or None if no node has room."""
        able = [id for id in self._free if self._has(id, bundle)]
        if not able:
            return None
        node = able[0] if bundle else min(able, key=self._crowd)
        self.hold(node, bundle)
        return node

    def hold(self, node: str, bundle: Bundle) -> None:
        """Takes the room of a bundle that is on a node already; a node that is gone has none."""
        if node not in self._free:
            return
        for name, amount in bundle.items():
            self._free[node][name] = self._free[node].get(name, 0.0) - amount
        for device, share in self._devices(node, bundle.get("GPU", 0.0)):
            self._gpus[node][device] -= share
        self._guests[node] += not bundle

    def _has(self, node: str, bundle: Bundle) -> bool:
        free, amount = self._free[node], bundle.get("GPU", 0.0)
        enough = all(free.get(name, 0.0) + _SLACK >= n for name, n in bundle.items())
        return enough and (not amount or bool(self._devices(node, amount)))

    def _devices(self, node: str, amount: float) -> list[tuple[int, float]]:
        """The GPUs that an amount lies on, and its share of each; the fullest that suffices."""
        share = min(1.0, amount)
        fullest = sorted((free, device) for device, free in enumerate(self._gpus[node]))
        able = [device for free, device in fullest if free + _SLACK >= share]
        count = math.ceil(amount - _SLACK)
        return [(device, share) for device in able[:count]] if len(able) >= count else []

    def _crowd(self, node: str) -> float:
        """Workers that reserve nothing, for each CPU."""
        return (1 + self._guests[node]) / max(_SLACK, self._nodes[node].get("CPU", 0.0))


def fits(nodes: Sequence[Bundle], bundles: Iterable[Bundle]) -> bool:
    """Whether bundles can be placed on nodes, the largest first, each where there is room."""
    room = Room({str(i): node for i, node in enumerate(nodes)})
    ordered = sorted(bundles, key=bundle_size, reverse=True)
    return all(room.place(bundle) is not None for bundle in ordered)


def bundle_size(bundle: Bundle) -> tuple[float, ...]:
    """A key to sort bundles by; the largest are placed first."""
    return (bundle.get("GPU", 0.0), bundle.get("CPU", 0.0), sum(bundle.values()))


def can_hold(capacity: Capacity, bundles: Sequence[Bundle]) -> bool:
    """Whether bundles fit on an otherwise empty cluster, with the nodes that it may add."""
    most = len(bundles)  # more nodes than there are bundles help nobody
    growth = capacity.growth or ()
    added = [kind.resources for kind in growth for _ in range(min(most, kind.more))]
    return fits([*capacity.nodes, *added], bundles)


def check_can_fit(capacity: Capacity, pool: PoolSpec) -> None:
    """Raises ComputeError if a pool's least workers can never fit, as far as is known.

    Where a cluster may add nodes that it does not tell of, its autoscaler decides.
    """
    told = misfit(capacity, pool.label, pool.workers, pool.bundle)
    if told and capacity.growth is not None:
        raise ComputeError(told)


def misfit(
    capacity: Capacity,
    label: str,
    workers: tuple[int, int],
    bundle: Bundle,
    beyond: Callable[[Sequence[Bundle]], str | None] | None = None,
) -> str | None:
    """Why a pool's least workers do not fit on an otherwise empty cluster; None if they do.

    Args:
        capacity: What the cluster has.
        label: The pool's name.
        workers: Its least workers and its most.
        bundle: What one of them reserves.
        beyond: Asks the autoscaler, where it alone knows which nodes it may add.
    """
    least = workers[0]
    if can_hold(capacity, [bundle] * least):
        return None
    grown = ""
    if capacity.growth is None and beyond is not None:
        if (why := beyond([bundle] * least)) is None:
            return None
        grown = f", and {why}"
    elif capacity.growth:
        kinds = (f"{kind.more} with {_amounts(kind.resources)}" for kind in capacity.growth)
        grown = f", and may add {' or '.join(kinds)}"
    wanted = _amounts(bundle)
    has = ", ".join(f"{capacity.total(name):g} {name}" for name in bundle)
    if len(capacity.nodes) > 1:
        largest = max(capacity.nodes, key=lambda node: [node.get(name, 0.0) for name in bundle])
        has += f", the largest node {', '.join(f'{largest.get(n, 0.0):g} {n}' for n in bundle)},"
    fix = "Lower concurrency or what a worker reserves, or use a larger cluster"
    if least > 1 and fits(capacity.nodes, [bundle]):
        fix = f"Declare concurrency=(1, {workers[1]}) to take what there is, or {fix.lower()}"
    return (
        f"{label}: {least} workers of {wanted} each were asked for; the cluster has {has} on "
        f"{len(capacity.nodes)} node{'s' * (len(capacity.nodes) != 1)}{grown}. {fix}"
    )


def _amounts(bundle: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


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
    return can_hold(capacity, [p.bundle for p in merged.values() for _ in range(p.workers[0])])


def _larger(one: PoolSpec | None, other: PoolSpec) -> PoolSpec:
    return other if one is None or other.workers > one.workers else one
