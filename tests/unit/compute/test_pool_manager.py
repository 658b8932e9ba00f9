"""What a pool manager does for a worker that Ray doesn't place, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import ray

from support.pool_claims import claim
from vane_dagster.compute import pool_manager
from vane_dagster.compute.pool_manager import PoolManager
from vane_dagster.compute.pool_state import WorkerStart


def test_who_holds_what_a_worker_needs_is_ended_until_it_is_placed(monkeypatch):
    """Idle pools of its own first, and in each round those of managers of other versions."""
    ended: list[Any] = []
    placed: dict[str, str] = {}
    state = SimpleNamespace(
        idle_competitors=lambda claim: [name for name in ("one", "two") if name not in ended],
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
