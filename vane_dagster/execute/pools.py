"""The keeper's books: which pools there are, who leases them, and what a new lease may take.

Pure bookkeeping with the time given by the caller; `keeper.py` turns its answers into Ray actors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vane_dagster.execute.admission import Bundle, fits

LEASE_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
IDLE_SECONDS = 600.0
_POLL_SECONDS = 15.0


@dataclass(frozen=True)
class Claim:
    """What a lease asks of one pool."""

    identity: str
    label: str
    workers: tuple[int, int]
    bundle: Mapping[str, float]
    slots: int
    idle_seconds: float = IDLE_SECONDS


@dataclass
class Pool:
    """A pool that exists: its workers' names, and since when no lease holds it."""

    claim: Claim
    workers: list[str] = field(default_factory=list)
    idle_since: float = 0.0


@dataclass
class LeaseRecord:
    """A lease in force, or one that waits."""

    id: str
    run_id: str
    claims: tuple[Claim, ...]
    seen: float


@dataclass(frozen=True)
class Grant:
    """What is to be done for a lease: workers to end, and workers to start, each with its claim."""

    kill: tuple[str, ...]
    create: tuple[tuple[str, Claim], ...]


class Books:
    """Pools, leases and the queue for them. Not thread-safe: the keeper has one thread."""

    def __init__(self, now: float) -> None:
        self.pools: dict[str, Pool] = {}
        self.leases: dict[str, LeaseRecord] = {}
        self.queue: list[LeaseRecord] = []
        self.settled_at = now

    def adopt(self, claim: Claim, worker: str, now: float) -> None:
        """Takes up a worker found after a restart; nothing is evicted for one lease time."""
        pool = self.pools.setdefault(claim.identity, Pool(claim, idle_since=now))
        pool.workers.append(worker)
        self.settled_at = now + LEASE_SECONDS

    def ask(
        self, id: str, run_id: str, claims: Sequence[Claim], nodes: Sequence[Bundle], now: float
    ) -> Grant | None:
        """Grants a lease on all its pools at once, or queues it, first come first served.

        A request passes an earlier one only where the two want no resource in common.

        Returns:
            What to do for it; None while it has to wait.
        """
        self.queue = [r for r in self.queue if now - r.seen < _POLL_SECONDS or r.id == id]
        request = next((r for r in self.queue if r.id == id), None)
        if request is None:
            request = LeaseRecord(id, run_id, tuple(claims), now)
            self.queue.append(request)
        request.seen = now
        for earlier in self.queue:
            if earlier is request:
                break
            if _kinds(earlier.claims) & _kinds(claims):
                return None
        grant = self._grant(claims, nodes, now)
        if grant is None:
            return None
        self.queue.remove(request)
        self.leases[id] = request
        self._apply(grant)
        return grant

    def _grant(self, claims: Sequence[Claim], nodes: Sequence[Bundle], now: float) -> Grant | None:
        wanted = {claim.identity: claim for claim in claims}
        idle = [] if now < self.settled_at else self._idle(exclude=wanted)
        killed: list[str] = []
        need = {i: max(c.workers[0], self._size(i)) for i, c in wanted.items()}
        while not fits(nodes, self._bundles(wanted, need, killed)):
            victim = next((i for i in idle if i not in killed and self.pools[i].claim.bundle), None)
            if victim is None:
                return None
            killed.append(victim)
        self._grow(wanted, need, killed, nodes)
        return Grant(
            tuple(worker for i in killed for worker in self.pools[i].workers),
            tuple(
                (_worker_name(i, slot), claim)
                for i, claim in wanted.items()
                for slot in range(self._size(i), need[i])
            ),
        )

    def _grow(
        self,
        wanted: Mapping[str, Claim],
        need: dict[str, int],
        killed: Sequence[str],
        nodes: Sequence[Bundle],
    ) -> None:
        """Raises the workers of each pool towards its most, one at a time, as far as they fit."""
        growing = True
        while growing:
            growing = False
            for identity, claim in wanted.items():
                if need[identity] >= claim.workers[1]:
                    continue
                need[identity] += 1
                if fits(nodes, self._bundles(wanted, need, killed)):
                    growing = True
                else:
                    need[identity] -= 1

    def _bundles(
        self, wanted: Mapping[str, Claim], need: Mapping[str, int], killed: Sequence[str]
    ) -> list[Bundle]:
        held = [
            pool.claim.bundle
            for identity, pool in self.pools.items()
            if identity not in wanted and identity not in killed
            for _ in pool.workers
        ]
        return held + [c.bundle for i, c in wanted.items() for _ in range(need[i])]

    def _apply(self, grant: Grant) -> None:
        self.forget(grant.kill)
        for worker, claim in grant.create:
            self.pools.setdefault(claim.identity, Pool(claim)).workers.append(worker)

    def _size(self, identity: str) -> int:
        return len(self.pools[identity].workers) if identity in self.pools else 0

    def _idle(self, exclude: Iterable[str] = ()) -> list[str]:
        """Pools that no lease holds, the least recently used first."""
        held = {c.identity for lease in self.leases.values() for c in lease.claims} | set(exclude)
        free = [identity for identity in self.pools if identity not in held]
        return sorted(free, key=lambda identity: self.pools[identity].idle_since)

    def heartbeat(self, id: str, run_id: str, claims: Sequence[Claim], now: float) -> None:
        """Keeps a lease alive; one that a restarted keeper does not know is learnt again."""
        lease = self.leases.setdefault(id, LeaseRecord(id, run_id, tuple(claims), now))
        lease.seen = now

    def release(self, id: str, now: float) -> None:
        """Ends a lease, or a request for one."""
        self.queue = [request for request in self.queue if request.id != id]
        if lease := self.leases.pop(id, None):
            for claim in lease.claims:
                if claim.identity in self.pools:
                    self.pools[claim.identity].idle_since = now

    def expired(self, now: float) -> list[str]:
        """Leases whose holder was not heard of for a lease time."""
        return [i for i, lease in self.leases.items() if now - lease.seen > LEASE_SECONDS]

    def idle_too_long(self, now: float) -> list[str]:
        """Pools that no lease held for their idle time."""
        if now < self.settled_at:
            return []
        return [
            i
            for i in self._idle()
            if now - self.pools[i].idle_since > self.pools[i].claim.idle_seconds
        ]

    def evictable(self, identity: str | None) -> list[str]:
        """Pools that nobody leases: the named one, or all."""
        return [i for i in self._idle() if identity in (None, i)]

    def replace(self, worker: str) -> tuple[str, Claim] | None:
        """A new name for a worker in place of a lost one; None if it was replaced already."""
        for identity, pool in self.pools.items():
            if worker in pool.workers:
                slot = pool.workers.index(worker)
                pool.workers[slot] = _worker_name(identity, slot)
                return pool.workers[slot], pool.claim
        return None

    def forget(self, workers: Iterable[str]) -> None:
        """Strikes workers off, and pools without any."""
        gone = set(workers)
        for identity, pool in list(self.pools.items()):
            pool.workers = [worker for worker in pool.workers if worker not in gone]
            if not pool.workers:
                del self.pools[identity]

    def holders(self, identity: str) -> list[LeaseRecord]:
        """The leases on a pool."""
        return [
            lease
            for lease in self.leases.values()
            if any(claim.identity == identity for claim in lease.claims)
        ]


def _kinds(claims: Sequence[Claim]) -> set[str]:
    return {name for claim in claims for name in claim.bundle}


def _worker_name(identity: str, slot: int) -> str:
    return f"{identity}-{slot}-{secrets.token_hex(3)}"
