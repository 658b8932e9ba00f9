"""Pools, and claims on them."""

from __future__ import annotations

from vane_dagster.compute.pool_state import LeaseGrant, LeaseRecord, PoolState
from vane_dagster.worker.pools import PoolRequest, PoolSpec

ONE = {"n1": {"CPU": 4.0, "GPU": 1.0}}


def claim(
    identity: str, workers: tuple[int, int] = (1, 1), idle: float = 600, **bundle
) -> PoolRequest:
    return PoolRequest(identity, identity, workers, bundle, 1, idle_seconds=idle)


def ask(
    pool_state: PoolState,
    id: str,
    *claims: PoolRequest,
    nodes=ONE,
    now: float = 0.0,
    priority: int = 0,
) -> LeaseGrant | None:
    record = LeaseRecord(id, f"run-{id}", claims, now, priority=priority)
    return pool_state.request_lease(record, nodes, now)


def spec(identity: str, workers: tuple[int, int] = (1, 1), **bundle: float) -> PoolSpec:
    return PoolSpec(identity, identity.title(), workers, bundle)
