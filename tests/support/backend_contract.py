"""The contract of a compute backend: tests over the fixture `backend`, which has two CPUs."""

from __future__ import annotations

import time
from typing import Any

from vane_dagster.compute.api import Backend, CallResult, Lease
from vane_dagster.worker.protocol import LoadReport, PoolSpec

POOL = PoolSpec("contract", "Contract", (1, 1), {"CPU": 1.0})
NO_SERVERS: Any = {}


def answer(lease: Lease, ticket: int) -> CallResult:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for result in lease.wait(1):
            assert result.ticket == ticket
            return result
    raise TimeoutError("no call was answered")


def test_a_worker_is_leased_loaded_and_replaced(backend: Backend) -> None:
    assert backend.capacity().cpus >= 1
    assert backend.infeasible_reason([{"CPU": 1.0}]) is None
    lease = backend.lease("run", [POOL])
    (worker,) = lease.workers()
    assert worker.pool == POOL.identity
    assert lease.sharers() == {} or not any(lease.sharers().values())
    assert isinstance(answer(lease, lease.load(worker, NO_SERVERS)).report, LoadReport)
    other = lease.replace(worker)
    assert (other.pool, other.name != worker.name) == (POOL.identity, True)
    assert isinstance(answer(lease, lease.load(other, NO_SERVERS)).report, LoadReport)
    lease.release()


def test_a_released_worker_is_leased_again(backend: Backend) -> None:
    first = backend.lease("run", [POOL])
    (worker,) = first.workers()
    answer(first, first.load(worker, NO_SERVERS))
    first.release()
    second = backend.lease("run-2", [POOL])
    assert second.workers() == [worker]
    assert second.wait(0) == [], "no call of the former lease"
    second.release()


__all__ = [name for name in dir() if name.startswith("test_")]
