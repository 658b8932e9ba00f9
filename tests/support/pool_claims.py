"""Pools, and claims on them."""

from __future__ import annotations

from vane_dagster.compute.pool_state import Books, Grant, LeaseRecord
from vane_dagster.worker.protocol import Claim, PoolSpec

ONE = {"n1": {"CPU": 4.0, "GPU": 1.0}}


def claim(identity: str, workers: tuple[int, int] = (1, 1), idle: float = 600, **bundle) -> Claim:
    return Claim(identity, identity, workers, bundle, 1, idle_seconds=idle)


def ask(
    books: Books, id: str, *claims: Claim, nodes=ONE, now: float = 0.0, priority: int = 0
) -> Grant | None:
    record = LeaseRecord(id, f"run-{id}", claims, now, priority=priority)
    return books.ask(record, nodes, now)


def spec(identity: str, workers: tuple[int, int] = (1, 1), **bundle: float) -> PoolSpec:
    return PoolSpec(identity, identity.title(), workers, bundle)
