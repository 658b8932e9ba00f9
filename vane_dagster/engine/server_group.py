"""The servers of a wave: which replicas are ready, and which endpoints their callers use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from vane_dagster._secrets import keep
from vane_dagster.compute.api import Lease, Worker
from vane_dagster.events import Event, Noticed
from vane_dagster.servers.directory import Endpoints
from vane_dagster.servers.launch import Endpoint, ServerStatus
from vane_dagster.worker.pools import PoolSpec

ServerChanged = Callable[[PoolSpec, Mapping[str, ServerStatus], int], None]
"""Receives a server's pool, the state of its replicas by the name of their worker, and restarts."""


class ServerGroup:
    """The state of each replica, as its worker reported it last."""

    def __init__(
        self,
        lease: Lease,
        servers: Mapping[str, PoolSpec],
        clients: Mapping[str, PoolSpec],
        emit: Callable[[Event], None],
        changed: ServerChanged,
    ) -> None:
        self._lease, self._servers, self._clients, self._emit = lease, servers, clients, emit
        self._changed = changed
        # The replicas of each server, by the name of their worker.
        self._replicas = defaultdict[str, dict[str, ServerStatus]](dict)

    def endpoints_of(self, worker: Worker) -> Endpoints:
        """The endpoints of the servers that a worker's code calls, by the servers' keys.

        Each worker has another one first, which spreads workers over replicas.
        """
        pool = self._clients.get(worker.pool)
        if pool is None or not pool.uses:
            return {}
        peers = sorted(w.name for w in self._lease.workers() if w.pool == worker.pool)
        place = peers.index(worker.name) if worker.name in peers else 0
        endpoints = {key: self._ready(identity) for key, identity in pool.uses.items()}
        return {
            key: [*ready[place % len(ready) :], *ready[: place % len(ready)]] if ready else []
            for key, ready in endpoints.items()
        }

    def _ready(self, identity: str) -> Sequence[Endpoint]:
        """The endpoints of a server's replicas, in an order that is the same for all runs."""
        endpoints = (status.endpoint for _, status in sorted(self._replicas[identity].items()))
        return [endpoint for endpoint in endpoints if endpoint is not None]

    def answers(self, identity: str) -> bool:
        """Whether a replica of a server is up, as its worker reported it last."""
        return any(status.state == "ready" for status in self._replicas[identity].values())

    def update(self, worker: Worker, status: ServerStatus) -> None:
        """Take over what a replica's worker reports, and tell the workers that call it."""
        replicas, endpoint = self._replicas[worker.pool], status.endpoint
        keep([endpoint.api_key] if endpoint else [])
        known, replicas[worker.name] = replicas.get(worker.name), status
        restarts = max(0, status.restarts - known.restarts) if known is not None else 0
        if restarts:
            label = self._servers[worker.pool].label
            self._emit(Noticed(f"{label}: replica {worker.name} was restarted: {status.reason}"))
        self._report(worker.pool, restarts)
        before = known and known.endpoint
        if before != endpoint or (before and endpoint and before.life != endpoint.life):
            self._announce(worker.pool)

    def remove(self, worker: Worker) -> None:
        """Forget a replica that is gone."""
        if self._replicas[worker.pool].pop(worker.name, None) is not None:
            self._report(worker.pool)
            self._announce(worker.pool)

    def tell(self, worker: Worker) -> None:
        """Tell a worker that is ready the endpoints of the servers that it calls.

        A call of another run may have kept it from its start, and those that came with the start
        are then older than those that were announced meanwhile.
        """
        if endpoints := self.endpoints_of(worker):
            self._lease.announce(worker, endpoints)

    def _report(self, identity: str, restarts: int = 0) -> None:
        self._changed(self._servers[identity], self._replicas[identity], restarts)

    def _announce(self, identity: str) -> None:
        for worker in self._lease.workers():
            pool = self._clients.get(worker.pool)
            if pool is not None and identity in pool.uses.values():
                self._lease.announce(worker, self.endpoints_of(worker))
