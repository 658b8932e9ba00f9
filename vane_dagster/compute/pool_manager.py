"""The pool manager: the Ray actor that creates and ends pool workers. Runs on the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from vane_dagster.compute.actor_names import NAMESPACE, actor_names, is_pool_manager
from vane_dagster.compute.connection import alive_nodes
from vane_dagster.compute.growth import Growth, adds_nodes
from vane_dagster.compute.pool_state import (
    LEASE_SECONDS,
    LeaseAnswer,
    LeaseRecord,
    Pool,
    PoolInfo,
    PoolState,
    WorkerStart,
)
from vane_dagster.compute.work_claims import ClaimAnswer, ClaimRequest, ClaimTable
from vane_dagster.worker.code_digest import protocol
from vane_dagster.worker.pools import PoolRequest, Whereabouts, WorkerInfo
from vane_dagster.worker.ray_actor import HostActor

_SWEEP_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_PLACED_SECONDS = 60.0
"""A process that has not started by then waits for resources."""
_PAUSE_SECONDS = 5.0
"""Seconds between two sweeps that are a pause of this process or of the GCS."""
_FINISH_SECONDS = 600.0
_REVOKED_SECONDS = 300.0
"""How long a call may go on after its lease has ended."""
_log = logging.getLogger(__name__)


class PoolManager:
    """Manages pools. All methods run in one event loop, so leases and evictions cannot race."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tag = "." + hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        self._pool_state = PoolState(self._tag)
        self._claims = ClaimTable()
        self._actors: dict[str, Any] = {}
        self._alone: dict[str, tuple[str, str, range | None, float]] = {}
        self._servers: dict[str, PoolRequest] = {}
        self._groups: set[str] = set()
        self._growth = Growth(self._pool_state)
        self._tasks: set[asyncio.Task[None]] = set()
        self._outside: set[str] = set()  # workers in no pool yet, or no more
        self._lock = asyncio.Lock()
        self._began = False
        self._swept, self._paused_until = time.monotonic(), 0.0
        # Makes a restarted pool manager adopt its pools even if nobody ever calls it again.
        ray.get_runtime_context().current_actor.hello.remote()

    async def hello(self) -> tuple[str, bool]:
        """The protocol of the code that runs here, and `Capacity.adds_nodes`."""
        await self._started()
        return protocol(), adds_nodes()

    async def acquire(self, request: LeaseRecord) -> LeaseAnswer:
        """Grant a lease, or answer that it must wait; drivers poll about every second."""
        await self._started()
        self._pool_state.remove_dead_idle(set(actor_names()))
        grant = self._pool_state.request_lease(request, self._nodes(), time.monotonic())
        if grant is None:
            self._grow()
            return LeaseAnswer(
                blocking_runs=tuple(self._pool_state.blocking_runs(request.id)),
                asked=self._growth.asked_for(request.id),
            )
        self._kill(grant.kill)
        for start in grant.start:
            self._create(start)
        known = self._actors.keys() & itertools.chain(*grant.workers.values())
        return LeaseAnswer(grant.workers, actors={name: self._actors[name] for name in known})

    async def heartbeat(self, beat: LeaseRecord) -> dict[str, str] | None:
        """Keep a lease alive; return `PoolState.moves`, or None if the lease has ended."""
        await self._started()
        is_alive = self._pool_state.heartbeat(beat, time.monotonic())
        return self._pool_state.moves(beat.id) if is_alive else None

    async def claim(self, request: ClaimRequest) -> list[ClaimAnswer]:
        """See `ClaimTable.ask`."""
        await self._started()
        return self._claims.ask(request, time.monotonic())

    async def end_claims(self, holder: str) -> None:
        """See `ClaimTable.end`."""
        await self._started()
        self._claims.end(holder, time.monotonic())

    async def release(self, id: str) -> None:
        """End a lease; work still queued under it is not done."""
        await self._started()
        self._end_lease(id)

    async def replace(self, worker: str, claim: PoolRequest, id: str, at_once: bool) -> str:
        """See `PoolState.replace` and `Lease.replace`."""
        await self._started()
        replacement, start = self._pool_state.replace(worker, claim, self._nodes(), id)
        if worker not in self._pool_state.pools[claim.identity].workers:
            self._kill([worker], at_once)
        if start is not None:
            self._create(start)
        return replacement

    async def begin_alone(self, worker: str, lease: str, call: str, rows: range | None) -> None:
        """Record the last call of a worker that has begun alone, and its rows in progress."""
        self._alone[worker] = lease, call, rows, time.monotonic()

    async def begun_alone(self, worker: str) -> tuple[str, str, range | None, float] | None:
        """The lease, the id and the rows of what has last begun alone, and the seconds since."""
        if (begun := self._alone.get(worker)) is None:
            return None
        lease, call, rows, since = begun
        return lease, call, rows, time.monotonic() - since

    async def evict(
        self, identity: str | None = None, force: bool = False, id: str = ""
    ) -> list[str]:
        """End the named pool, or all pools; without `force` none with a lease other than `id`."""
        await self._started()
        asked = [i for i in self._pool_state.pools if identity in (None, i)]
        held = {i: {lease.id for lease in self._pool_state.holders(i)} - {id} for i in asked}
        gone = [i for i in asked if force or not held[i]]
        for each in gone:
            self._drop(each)
        return gone

    async def pools(self) -> list[PoolInfo]:
        """The pools with their workers and leases, as plain values."""
        await self._started()
        descriptions = [
            self._described(identity, pool) for identity, pool in self._pool_state.pools.items()
        ]
        return list(await asyncio.gather(*descriptions))

    async def _described(self, identity: str, pool: Pool) -> PoolInfo:
        holders = self._pool_state.holders(identity)
        return {
            "identity": identity,
            "label": pool.claim.label,
            "stages": list(pool.claim.stages),  # that last leased it
            "server": pool.claim.server,
            "bundle": dict(pool.claim.bundle),
            "leases": [lease.run_id for lease in holders],
            "idle_seconds": 0.0 if holders else round(time.monotonic() - pool.idle_since, 1),
            "workers": await asyncio.gather(*(self._asked(worker) for worker in pool.workers)),
        }

    async def _asked(self, worker: str) -> WorkerInfo:
        facts: WorkerInfo | None
        try:
            facts = await _within(self._actors[worker].describe.remote(), _ANSWER_SECONDS)
        except ray.exceptions.RayError:
            facts = {"state": "dead"}
        facts = facts or {"state": "starting"}
        facts["name"] = worker
        return facts

    # After a restart

    async def _started(self) -> None:
        """On the first call, adopt the workers of a former pool manager and start the sweep."""
        async with self._lock:
            if self._began:
                return
            left = [n for n in actor_names() if n.endswith(self._tag) and not is_pool_manager(n)]
            if adoptions := [self._in_background(self._adopt(worker)) for worker in left]:
                await asyncio.wait(adoptions, timeout=_ANSWER_SECONDS)
            names = (group["name"] for group in placement_group_table().values())
            self._groups = {name for name in names if name.endswith(self._tag)}
            self._in_background(self._sweep())
            self._began = True

    async def _adopt(self, worker: str) -> None:
        """Adopt a worker as soon as it answers. User code that holds the GIL may delay its answer.

        A worker that does not answer is ended, unless a run leases it. One that a run has replaced
        meanwhile is ended, too.
        """
        self._outside.add(worker)
        try:
            self._actors[worker] = actor = ray.get_actor(worker, namespace=NAMESPACE)
            while (facts := await _within(actor.whereabouts.remote(), LEASE_SECONDS)) is None:
                if not self._pool_state.is_leased(worker):
                    ray.kill(actor)
        except (ray.exceptions.RayError, ValueError):  # it died
            return
        finally:
            self._outside.discard(worker)
        if any(worker in pool.replacements for pool in self._pool_state.pools.values()):
            ray.kill(actor)
            return
        self._pool_state.adopt(worker, facts, time.monotonic())
        self._servers.update({worker: facts[0]} if facts[0].server else {})

    # Background work

    async def _sweep(self) -> None:
        steps = [self._expire, self._empty_draining, self._forget_ended]
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._grow()
            for step in steps:
                try:
                    step()
                except Exception:  # the pool manager survives, and does the other steps
                    _log.exception("a sweep failed")

    def _expire(self) -> None:
        now, former = time.monotonic(), self._swept
        self._swept = now
        if now - former > _PAUSE_SECONDS:  # heartbeats came meanwhile, or could not
            self._paused_until = now + LEASE_SECONDS
        if now < self._paused_until:
            return
        for id in self._pool_state.expired(now):
            self._end_lease(id)
        self._claims.expire(now)
        for identity in self._pool_state.expired_pools(now):
            self._drop(identity)

    def _grow(self) -> None:
        try:
            self._growth.step(self._nodes(), time.monotonic())
        except Exception:  # it is retried, and a lease may be granted without it
            _log.exception("nodes could not be requested")

    async def _watch(self, start: WorkerStart, placed: Awaitable[Whereabouts]) -> None:
        """Ensure that a new worker is placed, even if others hold the resources that it reserves.

        The pool state may be wrong about free resources: it does not include actors of other
        programs and of pool managers of other versions, nor how Ray has placed shares on GPUs.
        """
        waiting = asyncio.ensure_future(placed)
        try:
            while not (await asyncio.wait([waiting], timeout=_PLACED_SECONDS))[0]:
                for identity in self._pool_state.idle_competitors(start.claim)[:1]:
                    self._drop(identity)
                for name in (n for n in actor_names() if is_pool_manager(n) and n != self._name):
                    ray.get_actor(name, namespace=NAMESPACE).evict.remote()
            self._pool_state.record_nodes(start.worker, waiting.result()[1])
        except (ray.exceptions.RayError, ValueError):  # this worker or that manager ended
            _log.info("worker %s did not start", start.worker)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    # Workers

    def _nodes(self) -> dict[str, dict[str, float]]:
        """The nodes that take new workers."""
        draining = self._pool_state.draining
        return {id: resources for id, resources in alive_nodes().items() if id not in draining}

    def _empty_draining(self) -> None:
        """Move workers from draining nodes, and end there what no run uses."""
        gcs: Any = internal_kv_get_gcs_client()
        self._pool_state.draining = frozenset(gcs.get_draining_nodes(timeout=_ANSWER_SECONDS))
        for start in self._pool_state.move(self._nodes()):
            self._create(start)
        unused = self._pool_state.unused()
        self._kill(unused)
        self._pool_state.remove_workers(unused)

    def _end_lease(self, id: str) -> None:
        lease = self._pool_state.leases.get(id)
        self._pool_state.release(id, time.monotonic())
        self._alone = {name: call for name, call in self._alone.items() if call[0] != id}
        for worker in self._actors.keys() & lease.workers if lease else ():
            self._actors[worker].revoke.remote(id)
            self._in_background(self._end_hung(self._actors[worker], id))

    async def _end_hung(self, actor: Any, lease: str) -> None:
        """End a worker that still works for a lease some minutes after its end.

        Runs replace it like any lost worker. User code that holds the GIL may delay its answer.
        """
        await asyncio.sleep(_REVOKED_SECONDS)
        with contextlib.suppress(ray.exceptions.RayError):  # it died already
            if await _within(actor.works_for.remote(lease), _REVOKED_SECONDS) is not False:
                ray.kill(actor)

    def _drop(self, identity: str) -> None:
        if (pool := self._pool_state.pools.get(identity)) is not None:
            workers = list(pool.workers)
            self._kill(workers)
            self._pool_state.remove_workers(workers)

    def _kill(self, workers: Sequence[str], at_once: bool = True) -> None:
        """End workers; servers finish their requests before, while Ray keeps their resources."""
        for worker in self._actors.keys() & workers:
            actor = self._actors.pop(worker)
            if (server := self._servers.pop(worker, None)) is not None:
                finished, seconds = actor.stop_server.remote(), server.stop_seconds
            elif not at_once:
                finished, seconds = actor.finish.remote(), _FINISH_SECONDS
            else:
                ray.kill(actor)
                continue
            self._outside.add(worker)  # Ray ends it with its placement group
            self._in_background(self._end(worker, actor, finished, seconds))

    async def _end(self, worker: str, actor: Any, finished: Awaitable[Any], seconds: float) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # it died already
            await _within(finished, seconds)
        ray.kill(actor)
        self._outside.discard(worker)

    def _forget_ended(self) -> None:
        """Remove the handles and placement groups of workers that have ended."""
        workers = {worker for pool in self._pool_state.pools.values() for worker in pool.workers}
        workers |= self._outside
        self._actors = {name: actor for name, actor in self._actors.items() if name in workers}
        for worker in self._groups - workers:
            with contextlib.suppress(ValueError):  # it is gone already
                remove_placement_group(get_placement_group(worker))
            self._groups.remove(worker)  # if that failed, the next sweep tries again

    def _create(self, start: WorkerStart) -> None:
        bundle, threads, node = dict(start.claim.bundle), _threads(start), start.nodes[0]
        strategy = NodeAffinitySchedulingStrategy(node, soft=False) if node else "DEFAULT"
        if start.claim.ranks > 1:  # the worker reserves nothing beside its ranks
            shares, bundle = [dict(share) for share in start.claim.shares], {}
            group = placement_group(shares, name=start.worker, lifetime="detached")
            strategy = PlacementGroupSchedulingStrategy(group, 0)
            self._groups.add(start.worker)
        host = ray.remote(concurrency_groups={"control": 2})(HostActor)
        actor = host.options(
            name=start.worker,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=bundle.pop("CPU", 0),
            num_gpus=bundle.pop("GPU", 0),
            memory=int(bundle.pop("memory", 0)) or None,
            resources=bundle,
            max_concurrency=start.claim.slots,
            max_restarts=0,
            scheduling_strategy=strategy,
        ).remote(start.claim, threads, (self._name, NAMESPACE))
        self._actors[start.worker] = actor
        self._servers.update({start.worker: start.claim} if start.claim.server else {})
        self._in_background(self._watch(start, actor.whereabouts.remote()))


def _threads(start: WorkerStart) -> int:
    nodes = alive_nodes().items()
    cpus = [int(node.get("CPU", 0)) for id, node in nodes if start.nodes[0] in ("", id)]
    return start.claim.threads_on(min(cpus, default=1))


async def _within(answer: Awaitable[Any], seconds: float) -> Any:
    """A worker's answer; None if it takes too long."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError:
        return None
