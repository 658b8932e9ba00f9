"""The contract of a compute backend: tests over the fixture `backend`, which has two CPUs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from uuid import uuid4

import cloudpickle
import pyarrow as pa
import pytest

from support.pool_models import until
from vane_dagster.compute.api import Backend, CallResult, Lease, Worker
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.worker.pools import ModelSpec, PoolSpec
from vane_dagster.worker.protocol import CallUdf, Gather, Op, Project, TableRows, Work
from vane_dagster.worker.reports import LoadReport, WorkerStatus, WorkReport

POOL = PoolSpec("contract", "Contract", (1, 1), {"CPU": 1.0})
NO_SERVERS: Any = {}
ROWS = pa.table({"id": [1, 2, 3]})
CALL = CallUdf(cloudpickle.dumps({}), None, BatchCall(), 1, "one_to_one", 1, ("id",), ())
"""A call for each row."""


def answer(lease: Lease, ticket: int) -> CallResult:
    (result,) = until(lambda: lease.wait(1), "the call is answered", 60)
    assert result.ticket == ticket
    return result


def load(lease: Lease, worker: Worker) -> LoadReport:
    report = answer(lease, lease.load(worker, NO_SERVERS)).report
    assert isinstance(report, LoadReport)
    return report


def start(lease: Lease, worker: Worker, op: Op, *inputs: Any, alone: str = "") -> int:
    """Start work on tables, or on slices of them: ``(table, start, stop)``."""
    given = [each if isinstance(each, tuple) else (each, 0, None) for each in inputs]
    rows = tuple(TableRows(place, *rest) for place, (_, *rest) in enumerate(given))
    work = Work(
        "stage 'docs/out', fragment 0", op, rows, ROWS.schema, "id", None, True, lease.id,
        worker=worker.name, alone=alone,
    )  # fmt: skip
    return lease.run(worker, work, [table for table, *_ in given])


def run(lease: Lease, worker: Worker, op: Op, *inputs: Any) -> tuple[Any, WorkReport]:
    done = answer(lease, start(lease, worker, op, *inputs))
    assert isinstance(done.report, WorkReport), done.lost
    return done.table, done.report


def held_pool(folder: Path) -> PoolSpec:
    """Return a pool whose function logs each row, and waits until `folder` has the file "go"."""

    def held(batch: pa.Table) -> pa.Table:
        import time
        from pathlib import Path

        with (Path(folder) / "calls").open("a") as file:
            file.write("row\n")
        deadline = time.monotonic() + 60
        while not (Path(folder) / "go").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return batch

    bundle = pack((), (held, (), {}))
    model = ModelSpec("held", False, bundle.payload)
    return PoolSpec(f"held{uuid4().hex}", "held", (1, 1), model=model, archive=bundle.archive)


def calls(folder: Path) -> int:
    log = folder / "calls"
    return log.read_text().count("row") if log.exists() else 0


def held_row(backend: Backend, folder: Path, pool: PoolSpec, alone: str = "") -> Any:
    """Return a lease, its worker, the worker's process, and a call that has begun its first row."""
    lease = backend.lease("run", [pool])
    (worker,) = lease.workers()
    report = load(lease, worker)
    if report.pid == os.getpid():
        pytest.skip("its workers are not processes")
    ticket = start(lease, worker, CALL, lease.put(ROWS), alone=alone)
    until(lambda: calls(folder), "its first row has begun")
    return lease, worker, report.pid, ticket


def test_a_worker_is_leased_loaded_and_replaced(backend: Backend) -> None:
    assert backend.capacity().cpus >= 1
    lease: Any = backend.lease("run", [POOL])
    (worker,) = lease.workers()
    assert worker.pool == POOL.identity
    load(lease, worker)
    other = lease.replace(worker)
    assert (other.pool, other.name != worker.name) == (POOL.identity, True)
    assert lease.workers() == [other]
    load(lease, other)
    lease.release()


def test_a_released_worker_is_leased_again(backend: Backend) -> None:
    first = backend.lease("run", [POOL])
    (worker,) = first.workers()
    load(first, worker)
    first.release()
    second = backend.lease("run-2", [POOL])
    assert second.workers() == [worker]
    assert second.wait(0) == [], "no call of the former lease"
    second.release()


def test_work_reads_tables_and_its_result_is_a_table(backend: Backend) -> None:
    lease = backend.lease("run", [POOL])
    (worker,) = lease.workers()
    load(lease, worker)
    rows = lease.put(ROWS)
    table, report = run(lease, worker, Gather(), rows, (rows, 1, 2))
    assert report.rows_out == 4
    assert lease.fetch(table)["id"].to_pylist() == [1, 2, 3, 2]
    again, _ = run(lease, worker, Gather(), table, (table, 3, 4))
    assert lease.fetch(again)["id"].to_pylist() == [1, 2, 3, 2, 2]
    lease.release()


def test_an_error_of_work_is_reported_and_loses_no_worker(backend: Backend) -> None:
    lease = backend.lease("run", [POOL])
    (worker,) = lease.workers()
    load(lease, worker)
    rows = lease.put(ROWS)
    _, report = run(lease, worker, Project((("id", "error('no such thing')"),), None), rows)
    assert report.fault is not None
    assert "stage 'docs/out', fragment 0" in report.fault.message
    assert "no such thing" in report.fault.message
    table, _ = run(lease, worker, Gather(), rows)
    assert lease.fetch(table).equals(ROWS)
    lease.release()


def test_a_worker_that_dies_loses_its_calls_and_is_replaced(
    backend: Backend, tmp_path: Path
) -> None:
    lease, worker, pid, ticket = held_row(backend, tmp_path, held_pool(tmp_path), "a call")
    os.kill(pid, signal.SIGKILL)
    done = answer(lease, ticket)
    assert (done.report, done.cause, bool(done.lost)) == (None, "unclear", True)
    assert done.at == range(1), "the rows of the batch in progress"
    later = start(lease, worker, CALL, lease.put(ROWS), alone="another")
    done = answer(lease, later)
    assert (done.report, done.cause, bool(done.lost)) == (None, "outside", True), "never begun"
    fresh = lease.replace(worker)
    assert lease.workers() == [fresh]
    assert load(lease, fresh).pid != pid
    (tmp_path / "go").touch()
    table, _ = run(lease, fresh, CALL, lease.put(ROWS))
    assert lease.fetch(table).equals(ROWS)
    lease.evict(worker.pool)
    lease.release()


def test_calls_of_a_worker_that_is_ended_on_purpose_are_lost_by_no_fault_of_theirs(
    backend: Backend, tmp_path: Path
) -> None:
    lease, worker, _, ticket = held_row(backend, tmp_path, held_pool(tmp_path))
    lease.replace(worker)
    done = answer(lease, ticket)
    assert (done.report, done.cause, bool(done.lost)) == (None, "outside", True)
    lease.evict(worker.pool)
    lease.release()


def test_a_released_lease_stops_its_work(backend: Backend, tmp_path: Path) -> None:
    pool = held_pool(tmp_path)
    first, *_ = held_row(backend, tmp_path, pool)
    first.release()
    second = backend.lease("run-2", [pool])
    (worker,) = second.workers()
    assert isinstance(answer(second, second.status(worker)).report, WorkerStatus)
    (tmp_path / "go").touch()  # after that answer, the worker knows that the lease has ended
    load(second, worker)
    table, _ = run(second, worker, CALL, second.put(ROWS))
    assert second.fetch(table).equals(ROWS)
    assert calls(tmp_path) == 1 + ROWS.num_rows, "the first row of the stopped work, and no other"
    second.evict(worker.pool)
    second.release()


__all__ = [name for name in dir() if name.startswith("test_")]
