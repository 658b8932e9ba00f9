"""What a compute resource gives the executor: leases on pools of workers, and calls of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Union

from vane_dagster import _failpoints
from vane_dagster._secrets import keep_variables
from vane_dagster.compute.code_digest import Versions
from vane_dagster.compute.placement import NodeType
from vane_dagster.compute.pool_state import Sharer
from vane_dagster.compute.waits import Waits
from vane_dagster.compute.work_claims import Claims
from vane_dagster.worker.protocol import LoadReport, PoolSpec, Starting, Work, WorkReport

IO_WORKERS = "io"
"""Identity of the pool that reads, projects, joins and writes."""


@dataclass(frozen=True)
class Capacity:
    """What a cluster has, and what it may add.

    Attributes:
        nodes: Resources of each node, under Ray's names.
        object_bytes: Memory for tables between stages, all nodes together.
        growth: The kinds of nodes that an autoscaler may add: none if there is no autoscaler,
            None if it does not tell.
    """

    nodes: tuple[Mapping[str, float], ...]
    object_bytes: int
    growth: tuple[NodeType, ...] | None = ()

    def total(self, name: str) -> float:
        """Amount of a resource on all nodes."""
        return sum(node.get(name, 0.0) for node in self.nodes)

    @property
    def cpus(self) -> int:
        """CPUs of all nodes, at least one."""
        return max(1, int(self.total("CPU")))


@dataclass(frozen=True)
class Worker:
    """A worker of a leased pool."""

    name: str
    pool: str


@dataclass(frozen=True)
class CallResult:
    """A call that ended.

    Attributes:
        ticket: What `Lease.load` or `Lease.run` gave.
        report: The worker's report; None if the worker or its data was lost.
        table: Reference to the rows, where the work kept them.
        lost: What was lost, where there is no report.
        worker_lost: Whether the worker itself has to be replaced.
        timed_out: Whether a deadline ended the worker; None where that is not known.
    """

    ticket: int
    report: Union[WorkReport, LoadReport, Starting, None]
    table: Any = None
    lost: str = ""
    worker_lost: bool = False
    timed_out: bool | None = None


class Cancelled(Exception):
    """The run was asked to stop."""


def forwarded(pool: PoolSpec) -> dict[str, str]:
    """The environment variables that go to a pool's workers with each lease."""
    found = {name: os.environ[name] for name in pool.env_vars if name in os.environ}
    keep_variables(found)
    return {**found, **_failpoints.variables()}


class Lease(Protocol):
    """A time-limited claim on pools, kept alive until it is released."""

    id: str

    def workers(self) -> Sequence[Worker]:
        """The workers of all leased pools."""

    def load(self, worker: Worker) -> int:
        """Has a worker construct its model, if it has not; answered by a `LoadReport`."""

    def sharers(self) -> Mapping[str, Sequence[Sharer]]:
        """The other runs that have workers of this lease too, by the worker's name."""

    def starting(self, worker: Worker) -> int:
        """Asks what a worker is at that constructs its model; answered by a `Starting`."""

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        """Has a worker do some work on tables given by reference; answered by a `WorkReport`."""

    def wait(self, timeout: float) -> list[CallResult]:
        """The calls that ended since; waits up to `timeout` seconds for the first."""

    def replace(self, worker: Worker) -> Worker:
        """A fresh worker in place of a dead or sick one."""

    def evict(self, pool: str) -> None:
        """Ends a pool whose model cannot be constructed."""

    def release(self) -> None:
        """Gives the pools back, warm, and stops what still runs under the lease."""


class Backend(Protocol):
    """A place where pools of workers live."""

    def capacity(self) -> Capacity:
        """What the cluster has."""

    def infeasible_reason(self, bundles: Sequence[Mapping[str, float]]) -> str | None:
        """Why the cluster can never hold some bundles together, as its autoscaler says.

        Asked where `Capacity.growth` does not tell; None if it can, and adds the nodes for it.
        """

    def versions(self) -> Mapping[str, Versions | str]:
        """What each node has that may have another environment than this process.

        A node that cannot run a worker gives the reason instead.

        Raises:
            ComputeError: If the cluster does not answer.
        """

    def claims(self, run_id: str) -> Claims:
        """The run's claims on fragments, which others that share the workers respect."""

    def lease(
        self,
        run_id: str,
        pools: Sequence[PoolSpec],
        cancelled: threading.Event | None = None,
        priority: int = 0,
        waits: Waits | None = None,
    ) -> Lease:
        """Claims all pools in one call, waiting until they fit.

        Args:
            run_id: The run.
            pools: The pools.
            cancelled: Ends the wait.
            priority: The run's; the highest goes first.
            waits: Is told which runs are ahead.

        Raises:
            Cancelled: If the event was set meanwhile.
            ComputeError: If they can never fit.
        """
