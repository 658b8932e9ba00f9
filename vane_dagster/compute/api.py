"""The interface between a compute resource and the executor: leases on pools, calls of workers."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Union

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_variables
from vane_dagster.compute.waits import Waits
from vane_dagster.compute.work_claims import Claims
from vane_dagster.errors import ComputeError
from vane_dagster.retries import Cause
from vane_dagster.servers.directory import Endpoints
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.reports import LoadReport, WorkerStatus, WorkReport

IO_WORKERS = "io"
"""Identity of the pool of I/O workers, which read, project, join and write."""
TICKETS = itertools.count(1)
"""Numbers for calls, unique in this process."""


def lease_expired(lease_id: str) -> ComputeError:
    """Build the error for a run whose lease expired while it computed."""
    return ComputeError(
        f"lease {lease_id} expired: the pool manager received no heartbeat from this run. Start "
        "the run again; finished work is kept"
    )


@dataclass(frozen=True)
class Capacity:
    """Resources of a cluster.

    Attributes:
        nodes: Resources of each node, under Ray's names.
        object_bytes: Memory for tables between stages on all nodes together, in bytes.
        adds_nodes: Whether an autoscaler may add nodes; it does not report which.
        is_cluster: Whether workers run on a cluster; otherwise they are subprocesses of the driver.
        driver: Resources of the driver's machine, for pools of subprocesses beside a cluster; None
            if no stage of the run has such a pool.
    """

    nodes: tuple[Mapping[str, float], ...]
    object_bytes: int
    adds_nodes: bool = False
    is_cluster: bool = True
    driver: Capacity | None = None

    def of(self, on_driver: bool) -> Capacity:
        """Resources for pools of one place."""
        if not on_driver or not self.is_cluster:
            return self
        assert self.driver is not None, "the run has no backend for subprocesses"
        return self.driver

    def total(self, name: str) -> float:
        """Amount of a resource on all nodes."""
        return sum(node.get(name, 0.0) for node in self.nodes)

    @property
    def cpus(self) -> int:
        """CPUs of all nodes, at least one."""
        return max(1, int(self.total("CPU")))

    def held(self, bundle: Mapping[str, float]) -> int:
        """Return how many workers use all of the GPUs, or without GPUs of the CPUs; at least 1."""
        most = [self.total(name) / amount for name, amount in bundle.items() if amount]
        if not bundle.get("GPU"):
            most.append(self.cpus)
        return max(1, int(min(most) + 1e-6))


class Worker(NamedTuple):
    """A worker of a leased pool. The driver hashes workers often, which a tuple does fastest."""

    name: str
    pool: str


@dataclass(frozen=True)
class CallResult:
    """A completed call.

    Attributes:
        ticket: The ticket that `Lease.load` or `Lease.run` returned.
        report: The worker's report; None if the worker or its data was lost.
        table: Reference to the rows, if the work kept them.
        lost: Description of the loss if there is no report.
        cause: Its cause. The worker must be replaced unless a table was lost.
        seconds: Seconds since a lost call, or its batch `at`, began; None if that is not known.
        at: The places of the rows that a lost call was computing; None if they are not known.
    """

    ticket: int
    report: Union[WorkReport, LoadReport, WorkerStatus, None]
    table: Any = None
    lost: str = ""
    cause: Cause = "unclear"
    seconds: float | None = None
    at: range | None = None


@dataclass(frozen=True)
class LeaseTerms:
    """How a run waits for a lease: until which event, ahead of whom, and what reports it."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    priority: int = 0
    waits: Waits = field(default_factory=lambda: Waits(lambda event: None))


class Cancelled(Exception):
    """The run was cancelled."""


def forwarded(pool: PoolSpec) -> dict[str, str | None]:
    """Environment variables sent to the workers of a pool with each lease; None unsets one."""
    variables = {name: os.environ[name] for name in pool.env_vars if name in os.environ}
    keep_variables(variables)
    return {**dict.fromkeys(pool.unset_vars), **variables, **_failpoints.variables()}


class Lease(Protocol):
    """A time-limited right to use pools, kept alive until it is released."""

    id: str

    def workers(self) -> Sequence[Worker]:
        """The workers of all leased pools."""

    def load(self, worker: Worker, endpoints: Endpoints) -> int:
        """Start constructing the model of a worker if it has none; answered by a `LoadReport`."""

    def announce(self, worker: Worker, endpoints: Endpoints) -> None:
        """Tell a worker the endpoints of servers that its code calls. Nothing answers."""

    def status(self, worker: Worker) -> int:
        """Ask what a worker is doing, while it works; answered by a `WorkerStatus`."""

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        """Start work on a worker; answered by a `WorkReport`."""

    def wait(self, timeout: float) -> list[CallResult]:
        """Return the calls completed since the last wait.

        Waits up to `timeout` seconds for the first.
        """

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        """Replace a worker by a new one.

        A dead or faulty one ends at once, any other when it has answered its calls of other runs.
        """

    def moves(self) -> Sequence[tuple[Worker, Worker]]:
        """Workers on nodes that drain since the last call, each with the one that replaces it.

        The first one serves calls until it is replaced by `replace`.
        """

    def evict(self, pool: str) -> None:
        """End a pool after its model could not be constructed."""

    def release(self) -> None:
        """Return the pools, warm, and stop the work still running under the lease."""


class Backend(Protocol):
    """An environment that hosts pools of workers."""

    def capacity(self) -> Capacity:
        """Resources of the cluster."""

    def running(self) -> set[str]:
        """Identities of the pools that have workers."""

    def claims(self, run_id: str) -> Claims:
        """The run's claims on partitions, which other runs with the same workers respect."""

    def lease(
        self, run_id: str, pools: Sequence[PoolSpec], terms: LeaseTerms | None = None
    ) -> Lease:
        """Lease all pools in one call; wait until they fit."""

    def close(self) -> None:
        """Release everything that must not outlive the run."""


class TableLostError(Exception):
    """A table between two tasks is lost; its fragment can start over."""
