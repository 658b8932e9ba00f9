"""The endpoints of servers as a worker process knows them.

The driver announces them: before a model that uses servers is constructed, and whenever a replica
starts, moves or ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from vane_dagster._secrets import keep
from vane_dagster.errors import StageError
from vane_dagster.servers.launch import Endpoint, health_problem, own_node_id

Endpoints = Mapping[str, Sequence[Endpoint]]
"""The endpoints of each server by its key, the one that a worker should prefer first."""

SERVER_MOVED = "its model was constructed with an outdated URL of a server"
"""Why a worker must be replaced if `Directory.is_outdated`."""
_PROBE_SECONDS = 5.0
_AVOID_SECONDS = 10.0


class Directory:
    """Endpoints by the key of their server; one instance a process, used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._node = ""
        self._endpoints: dict[str, tuple[Endpoint, ...]] = {}
        self._in_flight: Counter[Endpoint] = Counter()
        self._kept: dict[str, Endpoint] = {}
        self._bound: dict[str, Endpoint] = {}
        self._binding: int | None = None
        self._silent: dict[Endpoint, float] = {}
        """When each endpoint that does not answer was found so; it is avoided for ten seconds."""
        self._changed = defaultdict[str, dict[Endpoint, float]](dict)
        """When each endpoint of a server has ended, moved or come back last, if it has."""

    def update(self, announced: Endpoints) -> None:
        """Replace the endpoints of some servers."""
        if not announced:
            return
        self._node = own_node_id()
        with self._lock:
            for key, endpoints in announced.items():
                lives = {one: one.life for one in endpoints}
                for one in self._endpoints.get(key, ()):
                    if lives.get(one) != one.life:
                        self._changed[key][one] = time.monotonic()
                near_first = sorted(endpoints, key=lambda endpoint: endpoint.node_id != self._node)
                self._endpoints[key] = tuple(near_first)
        keep(one.api_key for endpoints in announced.values() for one in endpoints)

    def knows(self, key: str) -> bool:
        """Return whether this process knows the address of a server."""
        return key in self._endpoints

    def endpoints(self, key: str) -> Sequence[Endpoint]:
        """Return the endpoints of a server, those on this node first."""
        with self._lock:
            known = self._endpoints.get(key)
        if known is None:
            raise StageError(
                "this process does not know the address of the server. It is known in workers of a "
                "stage that declares the server, while they construct its class or call its "
                "function. Elsewhere, `vane-dagster pools endpoint` prints it"
            )
        return known

    def current(self, key: str) -> Endpoint:
        """Return the endpoint that this process uses: the same one, as long as it answers."""
        able = self._able(key)
        with self._lock:
            if self._kept.get(key) not in able:
                self._kept[key] = able[0]
            endpoints = self._kept[key]
            if self._binding == threading.get_ident():
                self._bound[key] = endpoints
        return endpoints

    @contextmanager
    def request(self, key: str) -> Iterator[Endpoint]:
        """Choose the endpoint of a request: on this node if there is one, the least loaded one.

        The load is the number of requests in flight from this process.
        """
        able = self._able(key)
        near = [one for one in able if one.node_id == self._node]
        with self._lock:
            chosen = min(near or able, key=self._in_flight.__getitem__)
            self._in_flight[chosen] += 1
        try:
            yield chosen
        finally:
            with self._lock:
                self._in_flight[chosen] -= 1

    def _able(self, key: str) -> Sequence[Endpoint]:
        """Return the endpoints of a server that do not restart, and answered a moment ago."""
        endpoints = self.endpoints(key)
        if not endpoints:
            raise ConnectionError("no replica of the server is ready")
        with self._lock:
            return [
                one for one in endpoints if not (self._is_avoided(one) or one.life[1])
            ] or endpoints

    def _is_avoided(self, endpoint: Endpoint) -> bool:
        return time.monotonic() - self._silent.get(endpoint, -math.inf) < _AVOID_SECONDS

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Note the endpoints that this thread asks for: the constructed model may keep them."""
        self._binding = threading.get_ident()
        try:
            yield
        finally:
            self._binding = None

    @property
    def is_outdated(self) -> bool:
        """Whether the model was constructed with an endpoint that exists no longer."""
        with self._lock:
            return any(one not in self._endpoints.get(key, ()) for key, one in self._bound.items())

    def probe(self, keys: Sequence[str], since: float) -> bool:
        """Ask all endpoints of some servers for their health."""
        by_key = {key: self.endpoints(key) for key in keys}
        silent = {one for endpoints in by_key.values() for one in endpoints if not answers(one)}
        now = time.monotonic()
        with self._lock:
            bound = set(self._bound.values())
            avoided = {one for one in self._silent if self._is_avoided(one)}
            spared = {one for one in avoided if self._silent[one] < since} - bound
            for one in (one for endpoints in by_key.values() for one in endpoints):
                if one not in silent:
                    self._silent.pop(one, None)
                elif one not in avoided:
                    self._silent[one] = now
            return all(
                set(endpoints) - spared
                and not any(one in silent or one.life[1] for one in endpoints if one not in spared)
                and not any(
                    at > since for one, at in self._changed[key].items() if one not in spared
                )
                for key, endpoints in by_key.items()
            )

    def is_usable(self, keys: Sequence[str]) -> bool:
        """Whether each server has an endpoint that answered the last probe, and does not restart.

        A server may answer before its supervisor has seen that it is ready. If it crashed then, its
        start would have failed. If the model was constructed with an endpoint, that one counts.
        """
        with self._lock:
            bound = dict(self._bound)
            down = {*self._silent}
            down.update(o for endpoints in self._endpoints.values() for o in endpoints if o.life[1])
        return all(
            {*([bound[key]] if key in bound else self.endpoints(key))} - down for key in keys
        )


def answers(endpoint: Endpoint) -> bool:
    """Whether an endpoint answers its health check."""
    return not health_problem(endpoint, _PROBE_SECONDS)


directory = Directory()
"""The directory of this process."""
