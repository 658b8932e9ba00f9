"""The host as a Ray actor.

Ray imports this module in each process that finds the actor: the pool manager and drivers too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import pyarrow as pa
import ray
from ray.util.placement_group import get_current_placement_group, placement_group_table

from vane_dagster._secrets import masked
from vane_dagster._worker_process import become_worker
from vane_dagster.servers.directory import Endpoints, directory
from vane_dagster.servers.launch import Endpoint, ServerStatus
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.code_digest import disagreement
from vane_dagster.worker.frameworks import set_threads
from vane_dagster.worker.log_sections import LogSections, tail
from vane_dagster.worker.pools import PoolRequest, Whereabouts, WorkerInfo, WorkerState
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import Fault, LoadReport, WorkerStatus, WorkReport, load_failed
from vane_dagster.worker.turns import Turns

_F = TypeVar("_F", bound=Callable[..., Any])
_control: Callable[[_F], _F] = ray.method(concurrency_group="control")
"""Decorates a method that never waits for tasks. Ray's decorator has no types."""
_RECORD_SECONDS = 10.0
_SENT_SECONDS = 0.2


class HostActor:
    """A host that the pool manager created, with control calls that never wait for tasks."""

    def __init__(self, claim: PoolRequest, threads: int, pool_manager: tuple[str, str]) -> None:
        become_worker()
        if not claim.bundle.get("GPU"):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves it as it is without a reserved GPU
        set_threads(threads)  # here, because Ray sets OMP_NUM_THREADS in tasks that find it unset
        from vane_dagster.worker.host import Host  # with DuckDB, which drivers need not import

        self._claim = claim
        self._threads = threads
        self._pool_manager = pool_manager
        self._turns = Turns()
        self._host = Host()
        self._sections = LogSections(ray.get_runtime_context().get_actor_name() or "")

    def load(self, call: LoadCall, archive: bytes) -> LoadReport:
        """See `Host.load`. The archive is an object of Ray, which is passed by itself."""
        if problem := disagreement(call.versions):
            return load_failed(Fault("ComputeError", f"node {socket.gethostname()}: {problem}"))
        call = replace(call, archive=archive, threads=call.threads or self._threads)
        self._sections.begin(call.run_id, call.stages)
        node = ray.get_runtime_context().get_node_id()
        return replace(self._host.load(call), ray_node=node)

    def run(self, work: Work, *tables: pa.Table) -> tuple[pa.Table | None, WorkReport]:
        """See `Host.run`."""
        with self._turns.take(bool(work.alone)):
            if work.alone:
                self._record(work)
            stages = () if self._host.instance is None else (work.stage,)
            self._sections.begin(work.run_id, stages)
            return self._host.run(work, *tables, record=lambda rows: self._record(work, rows))

    def _record(self, work: Work, rows: range | None = None) -> None:
        """Record where it outlives this process that a call, or its batch, has begun alone."""
        own = ray.get_runtime_context().get_actor_name()
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # its loss counts nothing
            manager = ray.get_actor(*self._pool_manager)
            begun = manager.begin_alone.remote(own, work.lease, work.alone, rows)
            ray.get(begun, timeout=_RECORD_SECONDS)

    def finish(self) -> None:
        """Wait for the calls that came before, and until Ray has sent their answers."""
        with self._turns.take(alone=True):
            time.sleep(_SENT_SECONDS)

    @_control
    def revoke(self, lease: str) -> None:
        """See `Host.revoke`."""
        self._host.revoke(lease)

    @_control
    def works_for(self, lease: str) -> bool:
        """See `Host.works_for`."""
        return self._host.works_for(lease)

    @_control
    def status(self) -> WorkerStatus:
        """See `Host.status`."""
        return self._host.status()

    @_control
    def announce(self, endpoints: Endpoints) -> None:
        """See `Directory.update`."""
        directory.update(endpoints)

    @_control
    def stop_server(self) -> None:
        """Stop the server that the worker runs; its requests in flight may end."""
        if self._host.server is not None:
            self._host.server.stop()

    @_control
    def log(self, lines: int) -> str:
        """Return the last lines of the worker's server, or else of its own process, masked."""
        if self._host.server is not None:
            return self._host.server.log(lines)
        return masked(tail(lines))

    @_control
    def server_endpoint(self) -> dict[str, Any] | None:
        """Return the address of the worker's server with its key; None unless it is ready."""
        status = self._host.status().server
        if status is None or status.endpoint is None or status.state != "ready":
            return None
        names = ("url", "grpc_url", "model", "health", "node", "api_key")
        return {name: getattr(status.endpoint, name) for name in names}

    @_control
    def whereabouts(self) -> Whereabouts:
        """Return what a restarted pool manager has to know of the worker."""
        nodes: tuple[str, ...] = (ray.get_runtime_context().get_node_id(),)
        if (group := get_current_placement_group()) is not None:
            by_share = placement_group_table(group)["bundles_to_node_id"]
            nodes = tuple(by_share[share] for share in sorted(by_share))
        return self._claim, nodes, self._host.leases

    @_control
    def describe(self) -> WorkerInfo:
        """Return the state of the worker for the command line, in plain values, no secrets."""
        loaded, status_here = self._host.loaded, self._host.status()
        state: WorkerState = "unloaded" if status_here.seconds is None else "starting"
        if loaded is not None and loaded.fault is None:
            state = "busy" if self._host.running else "ready"
        return {
            "state": state,
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "device": loaded.device if loaded else None,
            "load_seconds": loaded.seconds if loaded else None,
            "batches": self._host.served,
            **({"server": _server_info(status)} if (status := status_here.server) else {}),
        }


def _server_info(status: ServerStatus) -> dict[str, Any]:
    endpoint, info = status.endpoint or Endpoint(""), asdict(status)
    del info["endpoint"]
    address = {"url": endpoint.url, "grpc_url": endpoint.grpc_url, "model": endpoint.model}
    return {**info, **address, "gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}
