"""The host as a Ray actor. Imported on the cluster, and by the pool manager."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import pyarrow as pa
import ray

from vane_dagster._worker_process import mark_worker
from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.worker.frameworks import set_threads
from vane_dagster.worker.host import Host
from vane_dagster.worker.protocol import (
    LoadReport,
    ModelSpec,
    PoolRequest,
    Starting,
    Work,
    WorkerInfo,
    WorkerState,
    WorkReport,
)


class HostActor:
    """A host that the pool manager created, with control calls that never wait for tasks.

    Args:
        claim: The pool that the worker belongs to.
        threads: Its share of the machine's CPUs.
    """

    def __init__(self, claim: PoolRequest, threads: int) -> None:
        mark_worker()
        set_threads(threads)  # here, because Ray sets OMP_NUM_THREADS in tasks that find it unset
        self._claim = claim
        self._threads = threads
        self._host = Host(claim.slots)
        self._loaded: LoadReport | None = None

    def load(
        self,
        model: ModelSpec | None,
        archive: bytes,
        threads: int,
        env: Mapping[str, str],
        lifecycle: WorkerLifecycle,
    ) -> LoadReport:
        """See `Host.load`."""
        self._loaded = self._host.load(model, archive, threads or self._threads, env, lifecycle)
        return self._loaded

    def run(self, work: Work, *tables: pa.Table) -> tuple[pa.Table | None, WorkReport]:
        """See `Host.run`."""
        table, report = self._host.run(work, *tables)
        return (None if table is None else compact(table)), report

    # Ray's decorator has no types, here and in the methods that follow.
    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def revoke(self, lease: str) -> None:
        """See `Host.revoke`."""
        self._host.revoke(lease)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def starting(self) -> Starting:
        """See `Startup.status`."""
        return self._host.startup.status()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def whereabouts(self) -> tuple[PoolRequest, str]:
        """Return the worker's pool and Ray node, for a pool manager that was restarted."""
        return self._claim, ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def describe(self) -> WorkerInfo:
        """Return the state of the worker for `vane-dagster pools`, in plain values."""
        loaded = self._loaded
        state: WorkerState = "starting"
        if loaded is not None and loaded.fault is None:
            state = "busy" if self._host.busy else "ready"
        return {
            "state": state,
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "device": loaded.device if loaded else None,
            "load_seconds": loaded.seconds if loaded else None,
            "batches": self._host.served,
        }


def compact(table: pa.Table) -> pa.Table:
    """Copy a table into buffers of its own; pickling a slice includes its whole parent."""
    if table.get_total_buffer_size() <= 1.1 * table.nbytes + 4096:
        return table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()
