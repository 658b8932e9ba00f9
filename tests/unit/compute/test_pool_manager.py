"""What a pool manager does for a worker that Ray doesn't place, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from support.pool_claims import claim
from vane_dagster.compute import pool_manager
from vane_dagster.compute.pool_manager import PoolManager
from vane_dagster.compute.pool_state import LeaseRecord, PoolState, WorkerStart


def test_who_holds_what_a_worker_needs_is_ended_until_it_is_placed(monkeypatch):
    """Idle pools of its own first, and in each round those of managers of other versions."""
    ended: list[Any] = []
    placed: dict[str, str] = {}
    state = SimpleNamespace(
        idle_competitors=lambda claim, now: [name for name in ("one", "two") if name not in ended],
        record_nodes=placed.__setitem__,
    )

    async def watched() -> None:
        waiting = asyncio.get_running_loop().create_future()

        def evict() -> None:
            ended.append("all of another version")
            if ended.count("all of another version") == 3:
                waiting.set_result((claim("m"), "node"))

        other = SimpleNamespace(evict=SimpleNamespace(remote=evict))
        actors = {"keeper-own": None, "keeper-other": other, "m-0": None}
        monkeypatch.setattr(pool_manager, "actor_names", lambda: list(actors))
        monkeypatch.setattr(pool_manager, "is_pool_manager", lambda name: "keeper" in name)
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actors[name])
        manager = PoolManager.__new__(PoolManager)
        manager._name, manager._pool_state = "keeper-own", state
        manager._drop = ended.append
        await manager._watch(WorkerStart("m-0", claim("m"), ("",)), waiting)

    monkeypatch.setattr(pool_manager, "_PLACED_SECONDS", 0.001)
    asyncio.run(watched())
    others = "all of another version"
    assert ended == ["one", others, "two", others, others]
    assert placed == {"m-0": "node"}


@pytest.mark.parametrize("answers", [True, False])
def test_a_restarted_manager_ends_the_leases_that_no_driver_renews(monkeypatch, answers):
    """Their drivers died while there was no manager that knew them. Else their calls stay."""
    revoked: list[str] = []

    async def leases() -> set[str]:
        if not answers:
            raise ray.exceptions.ActorDiedError
        return {"of a dead run", "of a living run"}

    actor = SimpleNamespace(
        leases=SimpleNamespace(remote=leases), revoke=SimpleNamespace(remote=revoked.append)
    )
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    monkeypatch.setattr(pool_manager, "LEASE_SECONDS", 0.0)
    manager = PoolManager.__new__(PoolManager)
    manager._pool_state = state = PoolState()
    living, dead = (LeaseRecord(f"of a {run} run", run, (), 0.0) for run in ("living", "dead"))
    assert state.heartbeat(living, 0.0)
    asyncio.run(manager._end_unknown("m-0"))
    assert revoked == (["of a dead run"] if answers else [])
    assert state.heartbeat(dead, 0.0) is not answers, "a driver is told that its calls have ended"
