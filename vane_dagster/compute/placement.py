"""Placement of resource bundles on the nodes of a cluster: pure arithmetic."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

_Gpu = TypeVar("_Gpu")
Bundle = Mapping[str, float]
_SLACK = 1e-6


class FreeResources:
    """Free resources on the nodes of a cluster.

    A bundle goes to the smallest node with room, which keeps large nodes free for large bundles. A
    fraction of a GPU is placed on one GPU, as in Ray.
    """

    def __init__(self, nodes: Mapping[str, Bundle]) -> None:
        """Start with the resources of each node, by node id."""
        order = sorted(
            nodes, key=lambda id: (bundle_size(nodes[id]), sorted(nodes[id].items()), id)
        )
        self._nodes = {id: nodes[id] for id in order}
        self._free = {id: dict(nodes[id]) for id in order}
        self._gpus = {id: [1.0] * int(nodes[id].get("GPU", 0)) for id in order}
        self._guests = dict.fromkeys(order, 0)

    def place(self, bundle: Bundle, excluded: Collection[str] = ()) -> str | None:
        """Reserve room for a bundle; return the node, or None if no node has room."""
        able = (id for id in self._free if id not in excluded and self._has(id, bundle))
        node = next(able, None) if bundle else min(able, key=self._cpu_load, default=None)
        if node is not None:
            self.hold(node, bundle)
        return node

    def place_together(
        self, bundles: Sequence[Bundle], excluded: Collection[str] = ()
    ) -> tuple[str, ...] | None:
        """Reserve room for all bundles or for none; return their nodes, or None."""
        trial = self if len(bundles) == 1 else copy.deepcopy(self)
        nodes = [trial.place(bundle, excluded) for bundle in bundles]
        placed = tuple(node for node in nodes if node is not None)
        if len(placed) < len(bundles):
            return None
        vars(self).update(vars(trial))
        return placed

    def may_hold(self, amounts: Bundle) -> bool:
        """Whether all nodes together have these amounts, about: False is certain, and fast."""
        return all(
            1.01 * sum(max(0.0, free.get(name, 0.0)) for free in self._free.values()) >= amount
            for name, amount in amounts.items()
        )

    def hold(self, node: str, bundle: Bundle) -> None:
        """Reserve the room of a bundle already on a node; a lost node is ignored."""
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
        """The GPUs for an amount, with its share of each; the fullest ones that suffice."""
        share, free = min(1.0, amount), self._gpus[node]
        devices = gpus_for(amount, dict(enumerate(free)))
        enough = len(devices) >= amount - _SLACK and all(free[i] + _SLACK >= share for i in devices)
        return [(device, share) for device in devices] if enough else []

    def _cpu_load(self, node: str) -> float:
        """Workers without reservations, per CPU."""
        return (1 + self._guests[node]) / max(_SLACK, self._nodes[node].get("CPU", 0.0))


def gpus_for(amount: float, free: Mapping[_Gpu, float]) -> list[_Gpu]:
    """Return GPUs for an amount: the fullest with room, as in Ray, and then the freest others."""

    def order(gpu: _Gpu) -> tuple[bool, float]:
        has_room = free[gpu] + _SLACK >= min(1.0, amount)
        return not has_room, free[gpu] if has_room else -free[gpu]

    return sorted(free, key=order)[: math.ceil(amount - _SLACK)]


def fits(nodes: Sequence[Bundle], bundles: Iterable[Bundle]) -> bool:
    """Whether bundles can be placed on nodes: the largest first, each where there is room."""
    room = FreeResources({str(i): node for i, node in enumerate(nodes)})
    ordered = sorted(bundles, key=bundle_size, reverse=True)
    return all(room.place(bundle) is not None for bundle in ordered)


def bundle_size(bundle: Bundle) -> tuple[float, ...]:
    """Sort key for bundles; the largest are placed first."""
    return (bundle.get("GPU", 0.0), bundle.get("CPU", 0.0), sum(bundle.values()))
