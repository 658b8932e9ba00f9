"""Routed backend: pools on a cluster, and subprocesses of the driver beside them, in one run.

A worker reads tables of its own place alone. A table that the other place reads is copied there by
the driver, once, when the first call needs it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Union

from vane_dagster.compute.api import (
    TICKETS,
    CallResult,
    Capacity,
    LeaseTerms,
    TableLostError,
    Worker,
)
from vane_dagster.compute.local_backend import LocalBackend, LocalLease
from vane_dagster.compute.ray_backend import RayBackend, RayLease
from vane_dagster.compute.work_claims import Claims
from vane_dagster.servers.directory import Endpoints
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import Work

_POLL_SECONDS = 0.005
_Lease = Union[RayLease, LocalLease]


class RoutedBackend:
    """A cluster, with subprocesses on the driver's machine for the pools that ask for them."""

    def __init__(self, cluster: RayBackend, driver: LocalBackend) -> None:
        self._cluster, self._driver = cluster, driver

    def capacity(self) -> Capacity:
        """See `Backend.capacity`."""
        return replace(self._cluster.capacity(), driver=self._driver.capacity())

    def running(self) -> set[str]:
        """See `Backend.running`."""
        return self._cluster.running() | self._driver.running()

    def claims(self, run_id: str) -> Claims:
        """See `Backend.claims`."""
        return self._cluster.claims(run_id)

    def lease(
        self, run_id: str, pools: Sequence[PoolSpec], terms: LeaseTerms | None = None
    ) -> RayLease | RoutedLease:
        """See `Backend.lease`. The driver's own pools never wait, so they are leased last."""
        on_driver = [pool for pool in pools if pool.on_driver]
        on_cluster = [pool for pool in pools if not pool.on_driver]
        leased = self._cluster.lease(run_id, on_cluster, terms)
        if not on_driver:
            return leased
        try:
            own = self._driver.lease(run_id, on_driver, terms)
        except BaseException:
            leased.release()
            raise
        return RoutedLease(leased, own, [pool.identity for pool in on_driver])

    def close(self) -> None:
        """See `Backend.close`. The driver's pools end, and the cluster's stay warm."""
        try:
            self._driver.close()
        finally:
            self._cluster.close()


class RoutedTable:
    """A table between two tasks: a reference in its own place, and one in the other when needed."""

    def __init__(self, home: _Lease, reference: Any) -> None:
        self._home, self._reference = home, reference
        self._copy: Any = None

    def within(self, lease: _Lease) -> Any:
        """Return the reference for workers of a lease; copy the table there first if needed."""
        if lease is self._home:
            return self._reference
        if self._copy is None:
            self._copy = lease.put(self._home.fetch(self._reference))
        return self._copy


class RoutedLease:
    """Two leases as one. See `api.Lease`."""

    def __init__(self, cluster: RayLease, driver: LocalLease, on_driver: Sequence[str]) -> None:
        self.id = cluster.id
        self._cluster, self._driver = cluster, driver
        self._on_driver = frozenset(on_driver)
        self._failed: list[CallResult] = []

    def workers(self) -> Sequence[Worker]:
        """See `Lease.workers`."""
        return [*self._cluster.workers(), *self._driver.workers()]

    def load(self, worker: Worker, endpoints: Endpoints) -> int:
        """See `Lease.load`."""
        return self._lease_of(worker.pool).load(worker, endpoints)

    def announce(self, worker: Worker, endpoints: Endpoints) -> None:
        """See `Lease.announce`."""
        self._lease_of(worker.pool).announce(worker, endpoints)

    def status(self, worker: Worker) -> int:
        """See `Lease.status`."""
        return self._lease_of(worker.pool).status(worker)

    def run(self, worker: Worker, work: Work, tables: Sequence[RoutedTable]) -> int:
        """See `Lease.run`. Copies the tables that are not where the worker is."""
        lease = self._lease_of(worker.pool)
        try:
            there = [table.within(lease) for table in tables]
        except TableLostError as error:
            ticket = next(TICKETS)
            self._failed.append(CallResult(ticket, None, lost=str(error), cause="table"))
            return ticket
        return lease.run(worker, work, there)

    def wait(self, timeout: float) -> list[CallResult]:
        """See `Lease.wait`."""
        deadline = time.monotonic() + timeout
        while True:
            done, self._failed = self._failed, []
            left = 0.0 if done else max(0.0, deadline - time.monotonic())
            if not self._driver.is_called:
                return done + self._answers(self._cluster, left)
            done += self._answers(self._cluster, 0.0)
            done += self._answers(self._driver, 0.0 if done else min(left, _POLL_SECONDS))
            if done or time.monotonic() >= deadline:
                return done

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        """See `Lease.replace`."""
        return self._lease_of(worker.pool).replace(worker, at_once)

    def moves(self) -> Sequence[tuple[Worker, Worker]]:
        """See `Lease.moves`."""
        return self._cluster.moves()

    def evict(self, pool: str) -> None:
        """See `Lease.evict`."""
        self._lease_of(pool).evict(pool)

    def release(self) -> None:
        """See `Lease.release`."""
        try:
            self._driver.release()
        finally:
            self._cluster.release()

    def _lease_of(self, pool: str) -> _Lease:
        return self._driver if pool in self._on_driver else self._cluster

    def _answers(self, lease: _Lease, timeout: float) -> list[CallResult]:
        return [
            done if done.table is None else replace(done, table=RoutedTable(lease, done.table))
            for done in lease.wait(timeout)
        ]
