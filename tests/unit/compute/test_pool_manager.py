"""What a pool manager does for workers that aren't placed or don't answer, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from support.pool_claims import ONE, claim
from vane_dagster.compute import pool_manager
from vane_dagster.compute.pool_manager import PoolManager
from vane_dagster.compute.pool_state import LeaseRecord, PoolState, WorkerStart


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


@pytest.mark.parametrize(
    ("works", "is_ended"), [(True, True), (None, True), (False, False), ("died", False)]
)
def test_a_worker_whose_call_goes_on_after_its_lease_is_ended(works, is_ended, monkeypatch):
    """Also one that does not answer, because its code holds the GIL."""
    killed: list[Any] = []
    revoked: list[str] = []

    async def works_for(lease: str) -> bool:
        assert revoked == [lease]
        if works == "died":
            raise ray.exceptions.RayActorError
        return works if works is not None else await asyncio.Event().wait()

    actor = SimpleNamespace(
        revoke=SimpleNamespace(remote=revoked.append),
        works_for=SimpleNamespace(remote=works_for),
    )
    manager = PoolManager.__new__(PoolManager)
    manager._pool_state, manager._actors = PoolState(), {"m-0": actor, "m-1": SimpleNamespace()}
    manager._alone, manager._tasks = {}, set()
    beat = LeaseRecord("run-0", "run", (claim("m"),), 0.0, workers=("m-0",))
    assert manager._pool_state.heartbeat(beat, 0.0)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(pool_manager, "_REVOKED_SECONDS", 0.001)

    async def end() -> None:
        manager._end_lease("run-0")
        (task,) = manager._tasks
        assert not killed
        await task

    asyncio.run(end())
    assert killed == [actor] * is_ended


def test_a_worker_that_does_not_answer_is_adopted_later_or_ended_if_no_run_leases_it(monkeypatch):
    """Code may hold the GIL for longer than a restarted pool manager waits."""
    state, asked, killed = PoolState(), {"leased": 0, "unleased": 0, "replaced": 2}, []

    class Worker:
        def __init__(self, name: str) -> None:
            self.whereabouts = SimpleNamespace(remote=lambda: self.answer(name))

        async def answer(self, name: str) -> Any:
            asked[name] += 1
            if self in killed:
                raise ray.exceptions.RayActorError
            if asked[name] < 3:
                await asyncio.Event().wait()
            return claim("m"), ("n1",), {"run-0"}

    actors = {name: Worker(name) for name in asked}
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actors[name])
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(pool_manager, "LEASE_SECONDS", 0.001)
    manager = PoolManager.__new__(PoolManager)
    manager._pool_state, manager._actors, manager._servers = state, {}, {}
    manager._outside, manager._groups, removed = set(), {"leased", "ended"}, []
    monkeypatch.setattr(pool_manager, "get_placement_group", str)
    monkeypatch.setattr(pool_manager, "remove_placement_group", removed.append)
    beat = LeaseRecord("run-0", "run", (claim("m"),), 0.0, workers=("leased",))
    assert state.heartbeat(beat, 0.0)
    replacement, _ = state.replace("replaced", claim("m"), ONE)

    async def both() -> None:
        adoptions = [asyncio.ensure_future(manager._adopt(name)) for name in actors]
        await asyncio.sleep(0)
        manager._forget_ended()
        assert {*manager._actors} >= {"leased", "unleased"}
        await asyncio.gather(*adoptions)

    asyncio.run(both())

    assert killed == [actors["replaced"], actors["unleased"]]
    assert removed == ["ended"], "not the group of a worker that has not answered yet"
    assert {*state.pools["m"].workers} == {"leased", replacement}


def test_a_worker_that_finishes_keeps_its_placement_group_until_it_has_ended(monkeypatch):
    killed, removed = list[Any](), list[str]()
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(pool_manager, "get_placement_group", str)
    monkeypatch.setattr(pool_manager, "remove_placement_group", removed.append)

    async def finish() -> None:
        finished = asyncio.get_running_loop().create_future()
        actor = SimpleNamespace(finish=SimpleNamespace(remote=lambda: finished))
        manager = PoolManager.__new__(PoolManager)
        manager._pool_state, manager._actors, manager._servers = PoolState(), {"m-0": actor}, {}
        manager._outside, manager._groups, manager._tasks = set(), {"m-0"}, set()
        manager._kill(["m-0"], at_once=False)
        manager._forget_ended()
        assert not killed
        assert not removed
        finished.set_result(None)
        await asyncio.gather(*manager._tasks)
        manager._forget_ended()
        assert (killed, removed) == ([actor], ["m-0"])

    asyncio.run(finish())


def test_nothing_expires_right_after_a_pause_of_the_pool_manager(monkeypatch):
    """Heartbeats that came meanwhile are read first."""
    now, ended = [100.0], list[str]()
    monkeypatch.setattr(pool_manager.time, "monotonic", lambda: now[0])
    manager = PoolManager.__new__(PoolManager)
    manager._swept, manager._paused_until = now[0], 0.0
    manager._claims = SimpleNamespace(expire=lambda now: None)
    manager._pool_state = SimpleNamespace(
        expired=lambda now: ["lease"], expired_pools=lambda now: []
    )
    manager._end_lease = ended.append

    def sweep(seconds: float) -> int:
        now[0] += seconds
        manager._expire()
        return len(ended)

    assert (sweep(1), sweep(42)) == (1, 1)
    assert [sweep(1) for _ in range(31)] == [1] * 29 + [2, 3], "a lease has 30 s"
