"""What backends take of their machines, and conclude from errors."""

from __future__ import annotations

import itertools
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from support.pool_claims import spec
from vane_dagster.compute import local_backend, ray_backend
from vane_dagster.compute.api import Cancelled, LeaseTerms, Worker
from vane_dagster.compute.local_backend import own_gpus
from vane_dagster.compute.pool_state import LeaseAnswer, LeaseRecord
from vane_dagster.compute.ray_backend import RayBackend, RayLease
from vane_dagster.compute.waits import Waits
from vane_dagster.errors import ComputeError
from vane_dagster.events import Noticed

UNAVAILABLE = ray.exceptions.ActorUnavailableError("Socket closed", None)
DIED = ray.exceptions.ActorDiedError()
NO_MEMORY = ray.exceptions.OutOfMemoryError("too much")


@pytest.mark.parametrize(
    ("error", "alive", "drains", "cause"),
    [
        (DIED, True, False, "unclear"),  # its node has said so
        (DIED, True, True, "outside"),  # a node that is shut down ends its workers first
        (DIED, False, False, "outside"),
        (UNAVAILABLE, True, False, "outside"),  # nobody has; Ray does not know yet that it is dead
        (NO_MEMORY, True, True, "memory"),
    ],
)
def test_a_worker_is_lost_with_its_node_unless_the_node_reports_its_death(
    error: Exception, alive: bool, drains: bool, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeID": "a", "Alive": alive}, {"NodeID": "b", "Alive": not alive}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    lease: Any = RayLease.__new__(RayLease)
    lease._nodes, lease._workers, lease._moved = {"w": "a"}, [Worker("w", "pool")], set()
    lease._moves = {"w": "w2"} if drains else {}
    assert lease.moves() == [(Worker("w", "pool"), Worker("w2", "pool"))] * drains
    assert lease.moves() == [], "once"
    lease._watch = SimpleNamespace(call=lambda function: function())
    assert lease._cause(Worker("w", "pool"), error) == cause


@pytest.mark.parametrize(
    ("begun", "alone", "starting", "told"),
    [
        (("lease", "call", None, 3.0), "call", False, ("unclear", None, 3.0)),
        (("lease", "call", range(4), 3.0), "call", False, ("unclear", range(4), 3.0)),
        # It had not begun.
        (("lease", "call before", None, 3.0), "call", False, ("outside", None, None)),
        (None, "call", False, ("outside", None, None)),
        (None, "", True, ("unclear", None, None)),
        # Of a run that has loaded the model.
        (("other", "call", None, 3.0), "", True, ("shared", None, None)),
        (("other", "call", None, 3.0), "", False, ("unclear", None, None)),
    ],
)
def test_the_pool_manager_tells_which_call_had_begun_alone(
    begun: Any, alone: str, starting: bool, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(ref: str) -> None:
        raise DIED

    monkeypatch.setattr(ray, "get", get)
    lease: Any = RayLease.__new__(RayLease)
    lease.id, lease._actors = "lease", {}
    lease._pending = {"ref": (1, None, Worker("w", "pool"), alone, starting)}
    lease._cause = lambda worker, error: "unclear"
    lease._pool_manager = SimpleNamespace(call=lambda method, worker: begun)
    done = lease._done("ref")
    assert (done.cause, done.at, done.seconds) == told


def test_workers_are_called_by_the_handles_that_come_with_the_lease(monkeypatch):
    """Looking an actor up by its name takes milliseconds of a driver, for each of a pool."""
    called: list[str] = []

    def found(name: str, namespace: str) -> Any:
        called.append(f"looked up {name}")
        return SimpleNamespace(status=SimpleNamespace(remote=lambda: called.append(name)))

    monkeypatch.setattr(ray, "get_actor", found)
    watch: Any = SimpleNamespace(call=lambda function: function())
    given = {"a": SimpleNamespace(status=SimpleNamespace(remote=lambda: called.append("a")))}
    granted = LeaseAnswer({"m": ("a", "b")}, actors=given)
    record = LeaseRecord("run-07", "run", (spec("m").request(),), 0.0)
    lease = RayLease(cast(Any, None), watch, record, [spec("m")], granted)
    for worker in lease.workers():
        lease.status(worker)
    lease._over.set()
    assert called == ["a", "looked up b", "b"]


class PoolManager:
    """A pool manager of a cluster that adds nodes, but not for this lease."""

    def __init__(self) -> None:
        asked = LeaseAnswer(asked="2 x 1 GPU")
        self.answers = [asked, replace(asked, blocking_runs=("run-1",)), asked, asked]
        self.released = 0

    def call(self, method: str, *given: Any) -> Any:
        return self.answers.pop(0)

    def send(self, method: str, *given: Any) -> None:
        self.released += method == "release"


def test_a_run_says_what_it_waits_for_and_ends_if_no_node_is_added(monkeypatch) -> None:
    clock = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(ray_backend, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    backend: Any = RayBackend.__new__(RayBackend)
    backend._pool_manager, backend._idle_seconds, backend._lease_seconds = PoolManager(), 1, 1
    texts: list[str] = []
    terms = LeaseTerms(waits=Waits(lambda event: texts.append(event.text)))
    with pytest.raises(ComputeError) as caught:
        backend.lease("run", [spec("m", (2, 2), GPU=1)], terms)
    assert texts == [
        "waiting for M: the cluster's autoscaler was asked to make room for 2 x 1 GPU; `ray "
        "status` shows its progress"
    ]
    assert str(caught.value) == (
        "M: the cluster's autoscaler was asked to make room for 2 x 1 GPU and has not done so "
        "within half an hour. Lower concurrency or the resources of a worker, or raise the "
        "cluster's maximum size"
    )
    assert backend._pool_manager.released == 1


def test_a_run_that_waits_for_a_lease_says_for_whom_and_can_be_cancelled() -> None:
    backend: Any = RayBackend.__new__(RayBackend)
    backend._pool_manager, backend._idle_seconds, backend._lease_seconds = PoolManager(), 1, 1
    stop = threading.Event()
    backend._pool_manager.answers = [LeaseAnswer(blocking_runs=("run-1",))]
    events: list[Any] = []

    def cancel(event: Any) -> None:
        events.append(event)
        stop.set()

    with pytest.raises(Cancelled):
        backend.lease(
            "run-2", [spec("theirs", accelerator=1)], LeaseTerms(stop, waits=Waits(cancel))
        )
    text = "waiting for Theirs: its resources are in use or requested by run run-1"
    assert events == [Noticed(text, False)]
    assert backend._pool_manager.released == 1


@pytest.mark.parametrize(
    ("wanted", "taken", "gpus"),
    [
        (None, 0, ["4", "5", "6"]),
        (None, 1, ["5", "6"]),
        (None, 3, []),
        (1, 3, []),
        (1, 1, ["5"]),
        (5, 2, ["6"]),
    ],
)
def test_gpus_that_others_have_are_left_to_them(wanted, taken, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert own_gpus(wanted, taken) == gpus


def test_a_number_counts_where_no_gpu_is_listed(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert own_gpus(2, 0) == ["0", "1"]


@pytest.mark.parametrize(
    ("code", "kills", "cause"),
    [
        (-signal.SIGKILL, 1, "memory"),
        (-signal.SIGKILL, 0, "unclear"),
        (-signal.SIGSEGV, 1, "crash"),
        (3, 0, "crash"),
    ],
)
def test_a_killed_worker_is_out_of_memory_if_the_kernel_has_killed_a_process_for_it(
    code: int, kills: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        pid = 1

        def wait(self, timeout: float) -> int:
            return code

    worker: Any = local_backend.WorkerProcess.__new__(local_backend.WorkerProcess)
    worker.process, worker._memory_kills = Ended(), 7
    monkeypatch.setattr(local_backend, "_memory_kills", lambda: 7 + kills)
    assert worker.ending()[1] == cause
