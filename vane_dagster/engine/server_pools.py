"""Pools of servers: what a lease requests for a declared server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.compute.api import Capacity
from vane_dagster.compute.placement import fits
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.local_file import LocalFile, found_in
from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.servers.process import ServerProcess
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.worker.pools import ModelSpec, PoolSpec

_GRACE_SECONDS = 60.0


def declared_servers(pipeline: Pipeline, stages: Sequence[str]) -> Sequence[ModelServer]:
    """The servers that some stages use, each object once."""
    specs = [pipeline[stage].spec for stage in stages]
    return list(dict.fromkeys(one for s in specs if s.runs_udf for one in s.udf.servers.values()))


def server_pool(server: ModelServer, capacity: Capacity, root: StoragePath) -> PoolSpec:
    """The pool of a server."""
    bundle = server.bundle
    launch = server.launch()
    target: tuple[Any, ...] = (ServerProcess, (launch,), {})
    files = {file: file.content() for file in found_in(target, LocalFile)}
    packed = pack((), target, files)
    return PoolSpec(
        identity=server.identity(),
        label=server.label,
        workers=_replicas(server, bundle, capacity),
        bundle=bundle,
        model=ModelSpec(server.label, True, packed.payload, files=root if files else None),
        archive=packed.archive,
        env_vars=server.env_vars,
        # The replica's own limits come first: its error has the server's log.
        lifecycle=WorkerLifecycle(launch.startup_timeout_s + _GRACE_SECONDS),
        server=server.name,
        stop_seconds=launch.drain_timeout_s + _GRACE_SECONDS,
        per_node=server.per_node,
        idle_seconds=None if server.idle_minutes is None else 60 * server.idle_minutes,
    )


def _replicas(
    server: ModelServer, bundle: Mapping[str, float], capacity: Capacity
) -> tuple[int, int]:
    """Minimum and maximum number of replicas."""
    if server.per_node is not None:
        nodes = sum(fits([node], [bundle]) for node in capacity.nodes)
        return (1, max(1, server.per_node * nodes))
    return server.replicas
