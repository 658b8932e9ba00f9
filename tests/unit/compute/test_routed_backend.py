"""Two leases as one: where calls go, when tables are copied, and what a loss means."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from vane_dagster.compute.api import TICKETS, CallResult, Capacity, TableLostError, Worker
from vane_dagster.compute.routed_backend import RoutedBackend, RoutedLease, RoutedTable
from vane_dagster.errors import ComputeError
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.protocol import Gather, Work
from vane_dagster.worker.reports import LoadReport

ON_CLUSTER, ON_DRIVER = PoolSpec("c", "C", (1, 1)), PoolSpec("d", "D", (1, 1), on_driver=True)
CLUSTER, DRIVER, OTHER = Worker("c-1", "c"), Worker("d-1", "d"), Worker("d-2", "d")
ROWS = pa.table({"id": [1, 2, 3]})


def work(location: str = "here") -> Work:
    return Work(location, Gather(), (), ROWS.schema, "id", None, keep=True)


class Side:
    """A lease whose tables are in a dict, and whose calls end when the test says so."""

    def __init__(self, id: str, *workers: Worker) -> None:
        self.id, self._workers = id, workers
        self.sent: list[tuple[Worker, str, list[Any]]] = []
        self.answers: list[CallResult] = []
        self.tables: dict[str, pa.Table] = {}
        self.fetched: list[str] = []
        self.evicted: list[str] = []
        self.error: Exception | None = None
        self.is_released = False

    is_called = True

    def workers(self) -> Sequence[Worker]:
        return self._workers

    def load(self, worker: Worker, endpoints: Any = None) -> int:
        return next(TICKETS)

    status = load

    def run(self, worker: Worker, work: Work, tables: Sequence[Any]) -> int:
        self.sent.append((worker, work.location, list(tables)))
        return next(TICKETS)

    def wait(self, timeout: float) -> list[CallResult]:
        done, self.answers = self.answers, []
        if not done:
            time.sleep(timeout)
        return done

    def fetch(self, table: str) -> pa.Table:
        self.fetched.append(table)
        if self.error:
            raise self.error
        return self.tables[table]

    def put(self, rows: pa.Table) -> str:
        name = f"{self.id} table {len(self.tables)}"
        self.tables[name] = rows
        return name

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        return Worker(f"{worker.name}'", worker.pool)

    def evict(self, pool: str) -> None:
        self.evicted.append(pool)

    def release(self) -> None:
        self.is_released = True
        if self.error:
            raise self.error


class Pair:
    def __init__(self) -> None:
        self.cluster, self.driver = Side("cluster", CLUSTER), Side("driver", DRIVER, OTHER)
        self.lease = RoutedLease(self.cluster, self.driver, ["d"])

    def table(self, side: Side) -> RoutedTable:
        return RoutedTable(side, side.put(ROWS))


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.driver.error = made.cluster.error = None
    made.lease.release()


def test_answers_come_from_both_sides(pair):
    tickets = [pair.lease.load(CLUSTER, {}), pair.lease.load(DRIVER, {}), pair.lease.status(DRIVER)]
    assert len({*tickets}) == 3
    report = LoadReport(False, 1.0, 1, "cpu", "node")
    pair.driver.answers = [CallResult(tickets[2], report), CallResult(tickets[1], report)]
    pair.cluster.answers = [CallResult(tickets[0], None, lost="gone", cause="memory")]
    done = pair.lease.wait(1)
    assert [result.ticket for result in done] == [tickets[0], tickets[2], tickets[1]]
    assert (done[0].lost, done[0].cause) == ("gone", "memory")


def test_a_table_is_copied_once_and_only_for_the_other_side(pair):
    table = pair.table(pair.cluster)
    pair.lease.run(CLUSTER, work(), [table])
    assert pair.cluster.sent == [(CLUSTER, "here", ["cluster table 0"])]
    assert pair.cluster.fetched == []

    for worker in (DRIVER, OTHER, DRIVER):
        pair.lease.run(worker, work(), [table])
    assert {names[0] for _, _, names in pair.driver.sent} == {"driver table 0"}
    assert pair.driver.tables["driver table 0"].equals(ROWS)
    assert pair.cluster.fetched == ["cluster table 0"]


def test_a_lost_table_is_no_loss_of_the_worker(pair):
    pair.cluster.error = TableLostError("its node is gone")
    ticket = pair.lease.run(DRIVER, work(), [pair.table(pair.cluster)])
    (done,) = pair.lease.wait(5)
    assert done == CallResult(ticket, None, lost="its node is gone", cause="table")


def test_both_leases_end_whatever_happens_to_one(pair):
    pair.driver.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        pair.lease.release()
    assert pair.driver.is_released
    assert pair.cluster.is_released


class Host:
    def __init__(self, side: Side, capacity: Capacity, refusal: str = "") -> None:
        self.side, self._capacity, self._refusal = side, capacity, refusal
        self.asked: list[list[str]] = []
        self.is_closed = False

    def capacity(self) -> Capacity:
        return self._capacity

    def variables(self) -> Any:
        return self.side.id

    def claims(self, run_id: str) -> Any:
        return self.side.id

    def lease(self, run_id: str, pools: Sequence[PoolSpec], *rest: Any) -> Side:
        self.asked.append([pool.identity for pool in pools])
        if self._refusal:
            raise ComputeError(self._refusal)
        return self.side

    def close(self) -> None:
        self.is_closed = True


def hosts(refusal: str = "") -> tuple[Host, Host]:
    cluster = Host(Side("cluster", CLUSTER), Capacity(({"CPU": 64.0},), 100))
    machine = Capacity(({"CPU": 2.0},), 10, is_cluster=False)
    return cluster, Host(Side("driver", DRIVER), machine, refusal)


def test_a_lease_without_subprocesses_is_the_clusters_own():
    cluster, driver = hosts()
    assert RoutedBackend(cluster, driver).lease("run", [ON_CLUSTER]) is cluster.side
    assert driver.asked == []


def test_a_lease_is_returned_if_the_machine_cannot_hold_the_rest():
    cluster, driver = hosts("they do not fit on this machine")
    with pytest.raises(ComputeError, match="do not fit on this machine"):
        RoutedBackend(cluster, driver).lease("run", [ON_DRIVER, ON_CLUSTER])
    assert cluster.side.is_released
