"""Requests for nodes: pending placement groups, for which Ray's autoscalers add nodes.

Ray reserves the bundles of a group together or not at all, and removes the groups of an actor that
dies. So a request that waits holds nothing, and a dead pool manager leaves nothing behind.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vane_dagster._texts import resource
from vane_dagster.compute.placement import Bundle, bundle_size
from vane_dagster.compute.pool_state import POLL_SECONDS, PoolState

_SILENT_SECONDS = 120.0
_ANSWER_SECONDS = 5
_WAITING = ("PENDING", "PREPARED", "RESCHEDULING")
# An "autoscaler" that only mirrors manually started nodes names node types after the nodes.
_MIRRORED = re.compile(r"node_[0-9a-f]{56}")


class Growth:
    """Keeps one placement group for each lease request that is short of nodes.

    A group only posts demand: it is removed once there is room, and also when Ray reserves it.
    """

    def __init__(self, pool_state: PoolState) -> None:
        self._pool_state = pool_state
        self._posted: dict[str, tuple[Any, list[Bundle]]] = {}

    def step(self, nodes: Mapping[str, Bundle], now: float) -> None:
        """Match the groups to the waiting requests; one that Ray has reserved is posted again."""
        from ray.util import placement_group, placement_group_table, remove_placement_group

        if not self._pool_state.queue and not self._posted:
            return
        short = short_of_nodes(self._pool_state, nodes, now) if adds_nodes() else {}
        for id, (group, bundles) in list(self._posted.items()):
            state = placement_group_table(group).get("state")
            if short.get(id) != bundles or state not in _WAITING:
                remove_placement_group(group)
                del self._posted[id]
        for id, bundles in short.items():
            if id not in self._posted:
                group = placement_group([dict(bundle) for bundle in bundles], name=id)
                self._posted[id] = group, bundles

    def asked_for(self, id: str) -> str:
        """Resources for which a request waits, as text; empty if it does not wait for nodes."""
        return _listed(self._posted[id][1]) if id in self._posted else ""


def adds_nodes() -> bool:
    """Whether the cluster has an autoscaler that adds nodes.

    Version 2 also counts if it only mirrors manually started nodes.
    """
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    gcs: Any = internal_kv_get_gcs_client()

    def stored(key: bytes, namespace: bytes | None = None) -> bytes:
        return gcs.internal_kv_get(key, namespace=namespace, timeout=_ANSWER_SECONDS) or b""

    if stored(b"__autoscaler_v2_enabled", b"__autoscaler") == b"1":
        return bool(stored(b"AutoscalerMetricsAddress"))
    report = json.loads(stored(b"__autoscaling_status") or b"{}")
    scaler = report.get("autoscaler_report")
    if not scaler or time.time() - report["time"] > _SILENT_SECONDS:
        return False
    types = [*scaler["active_nodes"], *scaler["pending_launches"]]
    return any(not _MIRRORED.fullmatch(name) for name in types)


def short_of_nodes(
    pool_state: PoolState, nodes: Mapping[str, Bundle], now: float
) -> dict[str, list[Bundle]]:
    """Waiting requests that do not fit beside the leases even without the idle pools."""
    counts = {identity: len(pool_state.staying(identity)) for identity in pool_state.pools}
    short = {}
    for request in pool_state.queue:
        if now - request.seen >= POLL_SECONDS:
            continue
        claims = {claim.identity: claim for claim in request.claims if claim.bundle}
        missing = [
            share
            for identity, claim in claims.items()
            for _ in range(claim.workers[0] - counts.get(identity, 0))
            for share in claim.shares
        ]
        missing.sort(key=bundle_size, reverse=True)
        idle = [
            w for i in pool_state.idle() if i not in claims for w in pool_state.pools[i].workers
        ]
        evicted, free = pool_state.room(nodes, idle), pool_state.room(nodes, ())
        fits = [(evicted.place(b) is not None, free.place(b) is not None) for b in missing]
        if not all(in_place for in_place, _ in fits):
            short[request.id] = [
                bundle
                for bundle, (in_place, is_free) in zip(missing, fits)
                if is_free or not in_place
            ]
            for identity, claim in claims.items():
                counts[identity] = max(counts.get(identity, 0), claim.workers[0])
    return short


def _listed(bundles: Iterable[Bundle]) -> str:
    """Bundles as text; equal ones are counted."""
    texts = (" and ".join(resource(name, amount) for name, amount in b.items()) for b in bundles)
    return ", ".join(f"{count} x {text}" for text, count in Counter(texts).items())
