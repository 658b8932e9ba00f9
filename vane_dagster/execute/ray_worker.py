"""The host as a Ray actor. Imported on the cluster, and by the keeper."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import ray

from vane_dagster.execute.host import Host
from vane_dagster.execute.pools import Claim
from vane_dagster.execute.work import LoadReport, ModelSpec, Report, Work


class HostActor:
    """A host that the keeper made, with calls of its own for control, which never wait for work."""

    def __init__(self, claim: Claim, protocol: str) -> None:
        self._claim = claim
        self._protocol = protocol
        self._host = Host()
        self._loaded: LoadReport | None = None
        self._used = time.time()

    def load(
        self, model: ModelSpec | None, archive: bytes, threads: int, env: Mapping[str, str]
    ) -> LoadReport:
        """See `Host.load`."""
        self._loaded = self._host.load(model, archive, threads or self._share(), env)
        return self._loaded

    def run(self, work: Work, *tables: pa.Table) -> tuple[pa.Table | None, Report]:
        """See `Host.run`."""
        table, report = self._host.run(work, *tables)
        self._used = time.time()
        return (None if table is None else compact(table)), report

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def revoke(self, lease: str) -> None:
        """See `Host.revoke`."""
        self._host.revoke(lease)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def describe(self) -> dict[str, Any]:
        """What `vane-dagster pools` shows of a worker, and what a restarted keeper needs."""
        loaded = self._loaded
        return {
            "claim": self._claim,
            "protocol": self._protocol,
            "pid": loaded.pid if loaded else None,
            "node": loaded.node if loaded else None,
            "device": loaded.device if loaded else None,
            "load_seconds": loaded.seconds if loaded else None,
            "batches": self._host.served,
            "busy": self._host.busy > 0,
            "idle_seconds": time.time() - self._used,
        }

    def _share(self) -> int:
        """This worker's share of its node's CPUs, where it reserved none."""
        import os

        reserved = self._claim.bundle.get("CPU", 0)
        cpus = os.cpu_count() or 1
        return max(1, int(reserved)) if reserved else max(1, cpus // self._claim.workers[1])


def compact(table: pa.Table) -> pa.Table:
    """The table with buffers of its own; a slice is pickled with all that it is a slice of."""
    if table.get_total_buffer_size() <= 1.1 * table.nbytes + 4096:
        return table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()
