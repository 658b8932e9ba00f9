"""The keeper: the one Ray actor that creates and ends pool workers. Runs on the cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray

from vane_dagster.execute.pools import Books, Claim, Grant, Pool
from vane_dagster.execute.ray_worker import HostActor

NAMESPACE = "vane_dagster"
_SWEEP_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps pools. All methods run in one event loop, so that lease and eviction can't race."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._books = Books(time.monotonic())
        self._sweeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Lock | None = None

    async def acquire(self, id: str, run_id: str, claims: Sequence[Claim]) -> dict[str, Any]:
        """Grants a lease, or says that it has to wait: to be asked again every second or so.

        Returns:
            ``{"granted": bool, "workers": {identity: names}, "ahead": leases in the way}``.
        """
        await self._started()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        grant = self._books.ask(id, run_id, claims, nodes, time.monotonic())
        if grant is None:
            holders = {
                lease.run_id
                for lease in (*self._books.leases.values(), *self._books.queue)
                if lease.id != id
            }
            return {"granted": False, "workers": {}, "ahead": sorted(holders)}
        self._carry_out(grant)
        workers = {c.identity: list(self._books.pools[c.identity].workers) for c in claims}
        return {"granted": True, "workers": workers, "ahead": []}

    async def heartbeat(self, id: str, run_id: str, claims: Sequence[Claim]) -> None:
        """Keeps a lease alive."""
        await self._started()
        self._books.heartbeat(id, run_id, claims, time.monotonic())

    async def release(self, id: str) -> None:
        """Ends a lease; what is still queued under it is not done."""
        await self._started()
        self._end_lease(id)

    async def replace(self, worker: str) -> str:
        """Ends a worker and starts another in its slot.

        Returns:
            The new worker's name, or the same if it had been replaced before.
        """
        await self._started()
        self._kill([worker])
        replaced = self._books.replace(worker)
        if replaced is None:
            return ""
        self._create(*replaced)
        return replaced[0]

    async def evict(self, identity: str | None = None, leased: bool = False) -> list[str]:
        """Ends pools that nobody leases, or, if `leased`, the named one in any case.

        Returns:
            Identities of the pools that were ended.
        """
        await self._started()
        gone = self._books.evictable(identity)
        if leased and identity in self._books.pools and identity not in gone:
            gone.append(str(identity))
        for found in gone:
            self._drop(found)
        return gone

    async def pools(self) -> list[dict[str, Any]]:
        """The pools with their workers and leases."""
        await self._started()
        return [
            await self._described(identity, pool)
            for identity, pool in list(self._books.pools.items())
        ]

    async def _described(self, identity: str, pool: Pool) -> dict[str, Any]:
        holders = self._books.holders(identity)
        answers = await asyncio.gather(*(self._asked(worker) for worker in list(pool.workers)))
        return {
            "identity": identity,
            "label": pool.claim.label,
            "bundle": dict(pool.claim.bundle),
            "leases": [lease.run_id for lease in holders],
            "idle_seconds": 0.0 if holders else time.monotonic() - pool.idle_since,
            "workers": answers,
        }

    async def _asked(self, worker: str) -> dict[str, Any]:
        try:
            actor = ray.get_actor(worker, namespace=NAMESPACE)
            facts = await asyncio.wait_for(actor.describe.remote(), _ANSWER_SECONDS)
            return {"name": worker, "state": "ready", **facts}
        except asyncio.TimeoutError:
            return {"name": worker, "state": "starting"}
        except (ray.exceptions.RayError, ValueError):
            return {"name": worker, "state": "dead"}

    async def _started(self) -> None:
        """Once: takes up the workers that a former keeper left, and begins to sweep."""
        if self._ready is None:
            self._ready = asyncio.Lock()
        async with self._ready:
            if self._sweeper is None:
                await self._adopt()
                self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def _adopt(self) -> None:
        named = ray.util.list_named_actors(all_namespaces=True)
        own = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
        for worker in (name for name in own if not name.startswith("keeper-")):
            facts = await self._asked(worker)
            if facts.get("protocol") == self._protocol:
                self._books.adopt(facts["claim"], worker, time.monotonic())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                for id in self._books.expired(time.monotonic()):
                    self._end_lease(id)
                for identity in self._books.idle_too_long(time.monotonic()):
                    self._drop(identity)
            except Exception:  # the keeper outlives a fault of one sweep
                _log.exception("a sweep failed")

    def _end_lease(self, id: str) -> None:
        lease = self._books.leases.get(id)
        self._books.release(id, time.monotonic())
        for claim in lease.claims if lease else ():
            pool = self._books.pools.get(claim.identity)
            for worker in pool.workers if pool else ():
                try:
                    ray.get_actor(worker, namespace=NAMESPACE).revoke.remote(id)
                except ValueError:  # it died; a later run replaces it
                    continue

    def _drop(self, identity: str) -> None:
        workers = list(self._books.pools[identity].workers)
        self._kill(workers)
        self._books.forget(workers)

    def _carry_out(self, grant: Grant) -> None:
        self._kill(grant.kill)
        for worker, claim in grant.create:
            self._create(worker, claim)

    def _kill(self, workers: Sequence[str]) -> None:
        for worker in workers:
            try:
                ray.kill(ray.get_actor(worker, namespace=NAMESPACE))
            except ValueError:  # it is dead already
                continue

    def _create(self, worker: str, claim: Claim) -> None:
        bundle = dict(claim.bundle)
        ray.remote(concurrency_groups={"control": 2})(HostActor).options(
            name=worker,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=bundle.pop("CPU", 0),
            num_gpus=bundle.pop("GPU", 0),
            memory=int(bundle.pop("memory", 0)) or None,
            resources=bundle,
            max_concurrency=claim.slots,
            max_restarts=0,
            scheduling_strategy="DEFAULT" if claim.bundle else "SPREAD",
            runtime_env={"env_vars": {"VANE_PROTOCOL": self._protocol}},
        ).remote(claim, self._protocol)
