"""Lease requests that wait for more nodes, and the resulting autoscaler request. Pure, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping

from vane_dagster.compute.placement import Bundle, fits
from vane_dagster.compute.pool_state import POLL_SECONDS, PoolState


class ScaleVerdict(enum.Enum):
    """An autoscaler's response to a request."""

    UNSEEN = "it has not looked at it yet"
    SERVED = "the nodes are there, or on their way"
    INFEASIBLE = "it has no nodes for it"


class Demand:
    """Decides what to request from an autoscaler: room for all leases and for waiting requests.

    Waiting requests are added one after another, each after the verdict on the previous ones: an
    autoscaler that cannot serve a request in full may serve none of it. A request that cannot be
    served beside the leases waits until one of them ends.

    Attributes:
        hopeless: Requests for which no nodes can be added, though nobody else holds anything.
    """

    def __init__(self) -> None:
        self.hopeless: set[str] = set()
        self._served: list[str] = []
        self._trial: str | None = None
        self._beyond: set[str] = set()
        self._leases: set[str] = set()

    def asked_for(self) -> list[str]:
        """The lease requests for which room is requested from the autoscaler."""
        return [*self._served, *([self._trial] if self._trial else [])]

    def step(
        self, pool_state: PoolState, nodes: Mapping[str, Bundle], now: float, verdict: ScaleVerdict
    ) -> list[Bundle]:
        """Apply the verdict on the last step's result, and compute the next request.

        Args:
            pool_state: Pools, leases and the queue.
            nodes: Resources of each node, by node id.
            now: Monotonic time in seconds.
            verdict: The autoscaler's verdict on the result of the last step.

        Returns:
            Bundles that the cluster should hold in all; empty if no request waits for nodes.
        """
        leases = {
            id for id, lease in pool_state.leases.items() if any(c.bundle for c in lease.claims)
        }
        self._apply_verdict(verdict)
        queued = {request.id for request in pool_state.queue}
        if (self._leases | set(self._served)) - leases - queued:  # there may be free room again
            self._beyond.clear()
        self._leases = leases
        self.hopeless &= queued
        waiting = short_of_nodes(pool_state, nodes, now, self._beyond)
        self._served = [id for id in self._served if id in waiting]
        if self._trial not in waiting:
            self._trial = next((id for id in waiting if id not in self._served), None)
        asked = self.asked_for()
        return wanted(pool_state, asked) if asked else []

    def _apply_verdict(self, verdict: ScaleVerdict) -> None:
        if verdict is ScaleVerdict.INFEASIBLE and self._trial:
            self._beyond.add(self._trial)
            if not self._served and not self._leases:
                self.hopeless.add(self._trial)
        elif verdict is ScaleVerdict.INFEASIBLE:
            # Leased resources have grown since they were served.
            self._served.clear()
        elif verdict is ScaleVerdict.SERVED and self._trial:
            self._served.append(self._trial)
        if verdict is not ScaleVerdict.UNSEEN:
            self._trial = None


def wanted(pool_state: PoolState, ids: Collection[str]) -> list[Bundle]:
    """Bundles of all leases and of some waiting requests; workers that reserve nothing are omitted.

    Args:
        pool_state: Pools, leases and the queue.
        ids: Ids of the waiting requests to include.
    """
    sizes = {i: (p.claim.bundle, len(p.workers)) for i, p in pool_state.pools.items()}
    least = {identity: size for identity, size in sizes.items() if pool_state.holders(identity)}
    for request in pool_state.queue:
        for claim in request.claims if request.id in ids else ():
            _, known = least.get(claim.identity, (claim.bundle, 0))
            least[claim.identity] = (claim.bundle, max(known, claim.workers[0]))
    return [bundle for bundle, count in least.values() for _ in range(count) if bundle]


def short_of_nodes(
    pool_state: PoolState, nodes: Mapping[str, Bundle], now: float, excluded: Collection[str]
) -> list[str]:
    """Requests that do not fit beside the leases, in any placement on the present nodes.

    Args:
        pool_state: Pools, leases and the queue.
        nodes: Resources of each node, by node id.
        now: Monotonic time in seconds.
        excluded: Requests to leave out, together with all requests that must wait for them.
    """
    found, passed = [], set[str]()
    for request in pool_state.queue:
        if now - request.seen >= POLL_SECONDS:
            continue
        if request.id in excluded or request.kinds() & passed:
            passed |= request.kinds()
        elif not fits(list(nodes.values()), wanted(pool_state, [request.id])):
            found.append(request.id)
    return found


def listed(bundles: Iterable[Bundle]) -> str:
    """Bundles as text; equal ones are counted."""
    counts: dict[str, int] = {}
    for bundle in bundles:
        text = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} x {text}" for text, count in counts.items())
