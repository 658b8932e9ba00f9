"""State of the pool manager: existing pools, their leases, and what a new lease may take.

Pure state with the time given by the caller; `pool_manager.py` turns its answers into Ray actors,
`local_backend.py` into processes.
"""

from __future__ import annotations

import bisect
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from vane_dagster.compute.placement import Bundle, FreeResources, bundle_size
from vane_dagster.worker.pools import PoolRequest, Whereabouts, WorkerInfo

LEASE_SECONDS = 30.0
POLL_SECONDS = 15.0
_RELEASED_TTL_SECONDS = 3600.0
_PRIORITY_AGING_SECONDS = 600.0


@dataclass
class Pool:
    """An existing pool.

    Attributes:
        claim: The latest request for the pool.
        workers: Names of its workers, and the nodes of their shares; a node is "" if Ray chooses
            it.
        replacements: The replacement of each lost worker.
        idle_since: Time since which no lease holds it, if none does.
    """

    claim: PoolRequest
    workers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    replacements: dict[str, str] = field(default_factory=dict)
    idle_since: float = 0.0


@dataclass
class LeaseRecord:
    """A lease in force or waiting.

    Attributes:
        id: Id of the lease.
        run_id: The run that holds it.
        claims: The requested pools.
        seen: Time of the last request or heartbeat of its holder.
        ttl_seconds: Seconds without a heartbeat after which it ends.
        workers: Names of the assigned workers.
        priority: Priority of the run; the highest goes first.
        asked_at: Time of the first request.
    """

    id: str
    run_id: str
    claims: tuple[PoolRequest, ...]
    seen: float
    ttl_seconds: float = LEASE_SECONDS
    workers: tuple[str, ...] = ()
    priority: int = 0
    asked_at: float = 0.0

    def kinds(self) -> set[str]:
        """Names of the requested resources."""
        return {name for claim in self.claims for name in claim.bundle}


@dataclass(frozen=True)
class LeaseAnswer:
    """The pool manager's answer to a request for a lease.

    Attributes:
        workers: Names of the workers of each pool; None while the request must wait.
        blocking_runs: Ids of the runs that hold or want resources of a waiting request.
        asked: Nodes requested from the autoscaler, as text; empty if none.
        actors: The workers' handles, so that drivers need not look each of them up.
    """

    workers: Mapping[str, Sequence[str]] | None = None
    blocking_runs: tuple[str, ...] = ()
    asked: str = ""
    actors: Mapping[str, Any] = field(default_factory=dict)


class PoolInfo(TypedDict):
    """A pool as shown by `vane-dagster pools`, in plain values; see `WorkerInfo`."""

    identity: str
    label: str
    stages: list[str]
    server: str
    bundle: dict[str, float]
    leases: list[str]
    idle_seconds: float
    workers: list[WorkerInfo]


@dataclass(frozen=True)
class WorkerStart:
    """A worker to start, and the nodes of its shares."""

    worker: str
    claim: PoolRequest
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class LeaseGrant:
    """Actions that a lease requires, and its workers afterwards, by pool identity."""

    kill: tuple[str, ...]
    start: tuple[WorkerStart, ...]
    workers: Mapping[str, tuple[str, ...]]


class PoolState:
    """Pools, leases and the queue for them. Not thread-safe: the pool manager has one thread.

    Attributes:
        draining: Ids of the nodes that Ray drains. The nodes that callers pass do not include them.
    """

    def __init__(self, tag: str = "") -> None:
        self.pools: dict[str, Pool] = {}
        self.leases: dict[str, LeaseRecord] = {}
        self.queue: list[LeaseRecord] = []
        self.draining: frozenset[str] = frozenset()
        self._tag = tag
        self._adopted: set[str] = set()
        self._ended: dict[str, float] = {}

    # Leases

    def request_lease(
        self, request: LeaseRecord, nodes: Mapping[str, Bundle], now: float
    ) -> LeaseGrant | None:
        """Grant a lease on all its pools at once, or queue it.

        The queue is ordered by priority, then by request time. A request's priority rises by one
        for every ten minutes in the queue, so no request waits forever. A request passes an
        earlier one only if the two want no resource in common.
        """
        if lease := self.leases.get(request.id):  # requested twice, because an answer was lost
            lease.seen = now
            return LeaseGrant((), (), self._by_pool(lease))
        self.queue = [r for r in self.queue if now - r.seen < POLL_SECONDS or r.id == request.id]
        known = next((r for r in self.queue if r.id == request.id), None)
        if known is None:
            request.asked_at = now
            self.queue.append(known := request)
        known.seen = now
        self.queue.sort(key=lambda r: (-_aged_priority(r, now), r.asked_at))
        if any(earlier.kinds() & known.kinds() for earlier in self._before(known)):
            return None
        plan = self._plan_of(known.claims, nodes)
        if plan is None:
            return None
        kill, start = plan
        self.remove_workers(kill)
        for new in start:
            pool = self.pools.setdefault(new.claim.identity, Pool(new.claim))
            pool.workers[new.worker] = new.nodes
        for claim in known.claims:
            self.pools[claim.identity].claim = claim
        known.workers = tuple(worker for claim in known.claims for worker in self._share(claim))
        self.queue.remove(known)
        self.leases[known.id] = known
        return LeaseGrant(tuple(kill), tuple(start), self._by_pool(known))

    def blocking_runs(self, id: str) -> list[str]:
        """Runs that hold or want resources of a waiting request."""
        request = next(r for r in self.queue if r.id == id)
        others = [*self.leases.values(), *self._before(request)]
        return sorted({o.run_id for o in others if o.kinds() & request.kinds()})

    def heartbeat(self, beat: LeaseRecord, now: float) -> bool:
        """Keep a lease alive; after a restart of the pool manager it is restored."""
        if beat.id in self._ended:
            return False
        if beat.id in self._adopted or beat.id not in self.leases:
            self._adopted.discard(beat.id)
            self.leases[beat.id] = beat
        self.leases[beat.id].seen = now
        return True

    def release(self, id: str, now: float) -> None:
        """End a lease, or a request for one."""
        self._ended = {i: at for i, at in self._ended.items() if now - at < _RELEASED_TTL_SECONDS}
        self._ended[id] = now
        self.queue = [request for request in self.queue if request.id != id]
        if lease := self.leases.pop(id, None):
            for claim in lease.claims:
                if claim.identity in self.pools:
                    self.pools[claim.identity].idle_since = now

    def expired(self, now: float) -> list[str]:
        """Leases without a heartbeat for longer than their `ttl_seconds`."""
        return [i for i, lease in self.leases.items() if now - lease.seen > lease.ttl_seconds]

    def holders(self, identity: str) -> list[LeaseRecord]:
        """The leases on a pool."""
        return [
            lease
            for lease in self.leases.values()
            if any(claim.identity == identity for claim in lease.claims)
        ]

    def is_leased(self, worker: str) -> bool:
        """Return whether a lease has a worker."""
        return any(worker in lease.workers for lease in self.leases.values())

    def _before(self, request: LeaseRecord) -> list[LeaseRecord]:
        return self.queue[: self.queue.index(request)]

    def _share(self, claim: PoolRequest) -> list[str]:
        """The workers of a pool for a new lease: those with the fewest other leases."""
        used = Counter(worker for lease in self.leases.values() for worker in lease.workers)
        workers = sorted(self.staying(claim.identity), key=used.__getitem__)
        return workers[: claim.workers[1]]

    def _by_pool(self, lease: LeaseRecord) -> dict[str, tuple[str, ...]]:
        return {
            claim.identity: tuple(w for w in self.staying(claim.identity) if w in lease.workers)
            for claim in lease.claims
        }

    # Room

    def _plan_of(
        self, claims: Sequence[PoolRequest], nodes: Mapping[str, Bundle]
    ) -> tuple[list[str], list[WorkerStart]] | None:
        """Workers to end and to start such that all claims hold; as few ended as possible."""
        victims, gone = self._evictable(claims), list[list[str]]()

        def suffices(count: int) -> bool:
            return self._placed(claims, nodes, victims[:count]) is not None

        if (start := self._placed(claims, nodes, gone)) is None:
            if not suffices(len(victims)):
                return None
            gone = victims[: bisect.bisect_left(range(len(victims)), True, lo=1, key=suffices)]
            start = self._placed(claims, nodes, gone)
        assert start is not None
        for spared in reversed(gone):
            rest = [victim for victim in gone if victim is not spared]
            if (other := self._placed(claims, nodes, rest)) is not None:
                gone, start = rest, other
        return [worker for victim in gone for worker in victim], start

    def _evictable(self, claims: Sequence[PoolRequest]) -> list[list[str]]:
        """Workers that may be ended for a request, in groups, the smallest loss first.

        Idle pools of others come first, the least recently used first; then workers of its own
        pools that nobody else leases, the newest first. Those below the minimum start elsewhere.
        """
        own = {claim.identity for claim in claims}
        idle = self.idle()
        free = [w for i in idle if i in own for w in reversed(self.staying(i))]
        return [self.staying(i) for i in idle if i not in own] + [[worker] for worker in free]

    def _placed(
        self,
        claims: Sequence[PoolRequest],
        nodes: Mapping[str, Bundle],
        gone: Sequence[Sequence[str]],
    ) -> list[WorkerStart] | None:
        """New workers that bring each pool to its minimum, and to its maximum if there is room."""
        ended = {worker for victim in gone for worker in victim}
        room = self.room(nodes, ended)
        sizes = {c.identity: len(set(self.staying(c.identity)) - ended) for c in claims}
        start: list[WorkerStart] = []
        least = Counter[str]()
        for claim in claims:
            lacking = max(0, claim.workers[0] - sizes[claim.identity])
            least.update({name: lacking * amount for name, amount in claim.bundle.items()})
        if not room.may_hold(least):
            return None

        def add(claim: PoolRequest) -> bool:
            nodes = room.place_together(claim.shares, self._full(claim, ended, start))
            if nodes is None:
                return False
            start.append(WorkerStart(self._name(claim.identity), claim, nodes))
            sizes[claim.identity] += 1
            return True

        for claim in sorted(claims, key=lambda claim: bundle_size(claim.bundle), reverse=True):
            while sizes[claim.identity] < claim.workers[0]:
                if not add(claim):
                    return None
        growing = list(claims)
        while growing:
            growing = [c for c in growing if sizes[c.identity] < c.workers[1] and add(c)]
        return start

    def _full(
        self, claim: PoolRequest, ended: Collection[str] = (), start: Sequence[WorkerStart] = ()
    ) -> set[str]:
        """Nodes that have as many workers of a pool as the pool may have on one."""
        if claim.per_node is None:
            return set()
        pool = self.pools.get(claim.identity)
        there = pool.workers.items() if pool else ()
        nodes = Counter(nodes[0] for worker, nodes in there if worker not in ended)
        nodes.update(each.nodes[0] for each in start if each.claim.identity == claim.identity)
        return {node for node, count in nodes.items() if count >= claim.per_node}

    def room(self, nodes: Mapping[str, Bundle], ended: Collection[str]) -> FreeResources:
        room = FreeResources(nodes)
        held = [
            share
            for pool in self.pools.values()
            for worker, nodes in pool.workers.items()
            if worker not in ended
            for share in zip(pool.claim.shares, nodes)
        ]
        for bundle, node in sorted(held, key=lambda one: bundle_size(one[0]), reverse=True):
            room.hold(node, bundle)
        return room

    def _name(self, identity: str) -> str:
        return f"{identity}-{secrets.token_hex(4)}{self._tag}"

    # Pools

    def adopt(self, worker: str, whereabouts: Whereabouts, now: float) -> None:
        """Register a worker that outlived a restart of the pool manager, with its leases.

        They have the pools and workers that are adopted with them, until their first heartbeat.
        """
        claim, nodes, leases = whereabouts
        pool = self.pools.setdefault(claim.identity, Pool(claim, idle_since=now))
        pool.workers[worker] = nodes
        for id in leases:
            lease = self.leases.setdefault(id, LeaseRecord(id, id.rpartition("-")[0], (), now))
            lease.claims = (*lease.claims, claim)
            lease.workers = (*lease.workers, worker)
            self._adopted.add(id)

    def record_nodes(self, worker: str, nodes: tuple[str, ...]) -> None:
        """Record the nodes on which Ray has placed a worker's shares."""
        for pool in self.pools.values():
            if worker in pool.workers:
                pool.workers[worker] = nodes

    def replace(
        self, worker: str, claim: PoolRequest, nodes: Mapping[str, Bundle], id: str = ""
    ) -> tuple[str, WorkerStart | None]:
        """Replace a lost worker, or one on a draining node that a lease has left.

        The latter stays while other leases use it.
        """
        pool = self.pools.setdefault(claim.identity, Pool(claim))
        leases = [lease for lease in self.leases.values() if worker in lease.workers]
        if self._drains(pool.workers.get(worker, ())) and {lease.id for lease in leases} - {id}:
            leases = [lease for lease in leases if lease.id == id]
        else:
            pool.workers.pop(worker, None)
        start = None if worker in pool.replacements else self._replacement(worker, pool, nodes)
        replacement = _latest(pool, worker)
        for lease in leases:
            given = [replacement if w == worker else w for w in lease.workers]
            lease.workers = tuple(dict.fromkeys(given))
        return replacement, start

    def _replacement(self, worker: str, pool: Pool, nodes: Mapping[str, Bundle]) -> WorkerStart:
        """Add another worker in the place of one, which Ray places if no node has room."""
        claim, replacement = pool.claim, self._name(pool.claim.identity)
        placed = self.room(nodes, ()).place_together(claim.shares, self._full(claim))
        placed = placed or ("",) * claim.ranks
        pool.workers[replacement] = placed
        pool.replacements[worker] = replacement
        return WorkerStart(replacement, claim, placed)

    def remove_workers(self, workers: Collection[str]) -> None:
        """Remove workers, and pools that have none left."""
        for identity, pool in list(self.pools.items()):
            for worker in set(workers) & set(pool.workers):
                del pool.workers[worker]
            if not pool.workers:
                del self.pools[identity]

    def remove_dead_idle(self, alive: Collection[str]) -> None:
        """Remove dead workers of pools that nobody leases; runs replace those that they lease."""
        idle = [worker for identity in self.idle() for worker in self.pools[identity].workers]
        self.remove_workers([worker for worker in idle if worker not in alive])

    def idle(self) -> list[str]:
        """Pools without a lease, the least recently used first."""
        held = {claim.identity for lease in self.leases.values() for claim in lease.claims}
        free = [identity for identity in self.pools if identity not in held]
        return sorted(free, key=lambda identity: self.pools[identity].idle_since)

    def idle_competitors(self, claim: PoolRequest) -> list[str]:
        """Idle pools that hold a resource of a claim, in the order of `idle`."""
        return [i for i in self.idle() if set(self.pools[i].claim.bundle) & set(claim.bundle)]

    def expired_pools(self, now: float) -> list[str]:
        """Pools without a lease for longer than their idle time."""
        pools = ((i, self.pools[i]) for i in self.idle())
        return [i for i, pool in pools if now - pool.idle_since > pool.claim.idle_seconds]

    # Draining nodes

    def staying(self, identity: str) -> list[str]:
        """The workers of a pool that are not on draining nodes."""
        workers = self.pools[identity].workers if identity in self.pools else {}
        return [worker for worker, nodes in workers.items() if not self._drains(nodes)]

    def move(self, nodes: Mapping[str, Bundle]) -> list[WorkerStart]:
        """Replace the leased workers on draining nodes; they stay until their leases leave them."""
        started = []
        for pool in self.pools.values():
            for worker in [w for w, on in pool.workers.items() if self._drains(on)]:
                leases = [lease for lease in self.leases.values() if worker in lease.workers]
                if leases and worker not in pool.replacements:
                    start = self._replacement(worker, pool, nodes)
                    started.append(start)
                    for lease in leases:
                        lease.workers = (*lease.workers, start.worker)
        return started

    def moves(self, id: str) -> dict[str, str]:
        """The workers that a lease has to leave, each with its replacement."""
        lease = self.leases[id]
        pools = [self.pools[c.identity] for c in lease.claims if c.identity in self.pools]
        replaced = [(pool, w) for pool in pools for w in lease.workers if w in pool.replacements]
        return {worker: _latest(pool, worker) for pool, worker in replaced}

    def unused(self) -> list[str]:
        """Workers on draining nodes that no lease has."""
        used = {worker for lease in self.leases.values() for worker in lease.workers}
        workers = [item for pool in self.pools.values() for item in pool.workers.items()]
        return [w for w, nodes in workers if self._drains(nodes) and w not in used]

    def _drains(self, nodes: Collection[str]) -> bool:
        return not self.draining.isdisjoint(nodes)


def _aged_priority(request: LeaseRecord, now: float) -> float:
    """Priority of a waiting request, raised by its time in the queue."""
    return request.priority + (now - request.asked_at) // _PRIORITY_AGING_SECONDS


def _latest(pool: Pool, worker: str) -> str:
    """The last one of a worker's replacements."""
    while worker in pool.replacements:
        worker = pool.replacements[worker]
    return worker
