"""Model loads, and starts of servers, until the metadata of a partition counts them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from vane_dagster.events import PoolLoads, ServerUse
from vane_dagster.servers.launch import Endpoint, ServerStatus
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.reports import LoadReport


class PoolUsage:
    """The workers of each pool that became ready since they were last counted.

    Workers are reported by the executor's thread, and counted by the committer's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[str, PoolLoads] = {}
        self._restarts = Counter[str]()
        self._replicas: dict[str, list[Mapping[str, str]]] = {}

    def worker_ready(self, pool: str, report: LoadReport) -> None:
        """Count a ready worker."""
        with self._lock:
            self._loads.setdefault(pool, PoolLoads()).add(report)

    def server_changed(
        self, server: PoolSpec, replicas: Mapping[str, ServerStatus], restarts: int
    ) -> None:
        """Record the state of a server, and count restarts."""
        shown = [_replica(server.server, status) for _, status in sorted(replicas.items())]
        with self._lock:
            self._restarts[server.identity] += restarts
            self._replicas[server.identity] = shown

    def take_loads(self, pool: str) -> PoolLoads:
        """Return the loads of a pool that were not returned before."""
        with self._lock:
            return self._loads.pop(pool, PoolLoads())

    def take_servers(self, servers: Sequence[str]) -> ServerUse:
        """Return the starts and restarts of servers that were not returned before."""
        with self._lock:
            loads = [self._loads.pop(server, PoolLoads()) for server in servers]
            return ServerUse(
                starts=sum(use.loads for use in loads),
                start_seconds=sum(use.load_seconds for use in loads),
                warm_hits=sum(use.warm for use in loads),
                restarts=sum(self._restarts.pop(server, 0) for server in servers),
                replicas=tuple(each for s in servers for each in self._replicas.get(s, ())),
            )


def _replica(name: str, status: ServerStatus) -> Mapping[str, str]:
    endpoint = status.endpoint or Endpoint("")
    return {"server": name, "url": endpoint.url, "node": endpoint.node, "state": status.state}
