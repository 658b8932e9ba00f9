"""The host as a Ray actor. Imported on the cluster, and by the keeper."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import pyarrow as pa
import ray

from vane_dagster.pipeline.options import Upkeep
from vane_dagster.worker.host import Host
from vane_dagster.worker.protocol import (
    Claim,
    LoadReport,
    ModelSpec,
    Report,
    Starting,
    Work,
    WorkerInfo,
    WorkerState,
)


class HostActor:
    """A host that the keeper made, with calls of its own for control, which never wait for work.

    Args:
        claim: What the worker was made for.
        threads: Its share of the node's CPUs.
    """

    def __init__(self, claim: Claim, threads: int) -> None:
        self._claim = claim
        self._threads = threads
        self._host = Host()
        self._loaded: LoadReport | None = None

    def load(
        self,
        model: ModelSpec | None,
        archive: bytes,
        threads: int,
        env: Mapping[str, str],
        upkeep: Upkeep,
    ) -> LoadReport:
        """See `Host.load`."""
        self._loaded = self._host.load(model, archive, threads or self._threads, env, upkeep)
        return self._loaded

    def run(self, work: Work, *tables: pa.Table) -> tuple[pa.Table | None, Report]:
        """See `Host.run`."""
        table, report = self._host.run(work, *tables)
        return (None if table is None else compact(table)), report

    # Ray's decorator has no types; so below.
    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def revoke(self, lease: str) -> None:
        """See `Host.revoke`."""
        self._host.revoke(lease)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def starting(self) -> Starting:
        """See `Startup.told`."""
        return self._host.startup.told()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def whereabouts(self) -> tuple[Claim, str]:
        """What a restarted keeper needs: what the worker was made for, and its node."""
        return self._claim, ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def describe(self) -> WorkerInfo:
        """What `vane-dagster pools` shows of a worker, in plain values."""
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
    """The table with buffers of its own; a slice is pickled with all that it is a slice of."""
    if table.get_total_buffer_size() <= 1.1 * table.nbytes + 4096:
        return table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()
