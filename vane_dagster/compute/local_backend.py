"""Local backend: pools of subprocesses, which run the same stages without Ray."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from vane_dagster._container import usable_cpus, usable_memory
from vane_dagster._private_folder import (
    is_safe_to_import_from,
    new_temporary_folder,
    temporary_root,
)
from vane_dagster.compute.api import (
    TICKETS,
    CallResult,
    Capacity,
    LeaseTerms,
    TableLostError,
    Worker,
    forwarded,
)
from vane_dagster.compute.local_guard import Guard
from vane_dagster.compute.placement import gpus_for
from vane_dagster.compute.pool_state import LeaseRecord, PoolState, WorkerStart
from vane_dagster.compute.work_claims import Claims
from vane_dagster.errors import names
from vane_dagster.retries import Cause
from vane_dagster.servers.directory import Endpoints
from vane_dagster.servers.guard import ending
from vane_dagster.worker.arrow_files import read_table, write_table
from vane_dagster.worker.calls import AnnounceCall, LoadCall, RunCall, WorkerReply
from vane_dagster.worker.isolation import NO_DESCRIPTORS_STATUS
from vane_dagster.worker.local_worker import CLOSED_STATUS, serve
from vane_dagster.worker.pools import PoolRequest, PoolSpec
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.watchdog import ended_by_deadline

_SHARED_MEMORY = "/dev/shm"
_DESCRIPTORS = {
    CLOSED_STATUS: "ended: its code closed file descriptors of the worker",
    NO_DESCRIPTORS_STATUS: "ended: its code used up the file descriptors",
}
_MIN_BYTES = 2**30
_END_SECONDS = 5.0


class LocalTable:
    """A table in an Arrow file, which is deleted when nothing refers to it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._end = weakref.finalize(self, Path(path).unlink, missing_ok=True)


class WorkerProcess:
    """A worker process and the driver's end of its socket."""

    def __init__(
        self,
        folder: str,
        claim: PoolRequest,
        threads: int,
        gpus: Sequence[str],
        guard: Guard,
    ) -> None:
        ours, theirs = socket.socketpair()
        share = {f"{name}_NUM_THREADS": str(threads) for name in ("OMP", "MKL", "OPENBLAS")}
        command = [*_worker_command(), str(theirs.fileno()), folder, str(claim.slots)]
        env = {**os.environ, **share, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with theirs:
            self.process = self._started(command, theirs.fileno(), env)
        guard.add(self.process.pid)
        self._guard = guard
        self.connection = Connection(ours.dup().detach())
        threading.Thread(target=_shut_down_at_end, args=(self.process, ours), daemon=True).start()
        self._memory_kills = _memory_kills()
        self.claim = claim
        self.threads = threads
        self.gpus = tuple(gpus)
        self.tickets: dict[int, LoadCall | RunCall | Literal["status"]] = {}
        self.begun: dict[int, tuple[range, float]] = {}

    def _started(
        self, command: Sequence[str], descriptor: int, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the process in a session of its own, with one inherited file descriptor."""
        return subprocess.Popen(
            command,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )

    @property
    def is_busy(self) -> bool:
        """Whether it constructs its model, or runs a task."""
        return any(call != "status" for call in self.tickets.values())

    def ending(self) -> tuple[str, Cause]:
        """How the process of a closed connection ended, and why."""
        pid = self.process.pid
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
            return f"worker process {pid} closed its connection and was killed", "crash"
        if ended_by_deadline(code):
            return f"worker process {pid} was ended by a deadline", "timeout"
        lost = f"worker process {pid} {_DESCRIPTORS.get(code) or ending(code)}"
        if code != -signal.SIGKILL:
            return lost, "crash"
        if _memory_kills() > self._memory_kills:
            return f"{lost}, after the kernel killed a process to free memory", "memory"
        return lost, "unclear"  # a deadline ends a process that was stopped with SIGKILL, too

    def stop_server(self) -> None:
        """Let the server that it runs finish its requests, and the process end after it."""
        with contextlib.suppress(OSError):  # it has ended
            self.connection.send((0, "stop"))

    def end(self) -> None:
        """Kill the process and all processes that user code has started."""
        if self.claim.server:
            self.stop_server()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.claim.stop_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._guard.remove(self.process.pid)
        self.process.wait()
        self.connection.close()  # a live worker would take it for the end of the run


def _memory_kills() -> int:
    """Processes that the kernel has killed to free memory; 0 where it does not count them."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as counts:
        return sum(int(line.split()[1]) for line in counts if line.startswith("oom_kill "))
    return 0


def _shut_down_at_end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Shut down the driver's end of a connection once the worker process has ended.

    A process forked by user code may hold the connection, which then stays open after the end.
    """
    with connection:
        if hasattr(os, "waitid"):  # keeps the pid and exit code for `WorkerProcess`
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def local_capacity(
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    taken_gpus: int = 0,
) -> Capacity:
    """Return what a `LocalBackend` of these arguments has, without starting one."""
    node: dict[str, float] = {
        "CPU": num_cpus or usable_cpus(),
        "memory": usable_memory(),
        **(resources or {}),
    }
    if devices := own_gpus(num_gpus, taken_gpus):
        node["GPU"] = len(devices)
    free = shutil.disk_usage(_roomy_folder() or temporary_root()).free
    return Capacity((node,), free, is_cluster=False)


class LocalBackend:
    """Pools of subprocesses of this process, warm while it lives.

    A closed backend that `warm` made waits for the next run of this process, which ends the pools
    that were idle for ten minutes. One waits at a time.
    """

    _process = WorkerProcess

    def __init__(
        self,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        resources: Mapping[str, float] | None = None,
        taken_gpus: int = 0,
    ) -> None:
        self._devices = own_gpus(num_gpus, taken_gpus)
        self._capacity = local_capacity(num_cpus, num_gpus, resources, taken_gpus)
        self._nodes = {"": self._capacity.nodes[0]}
        self._pool_state = PoolState()
        self.processes: dict[str, WorkerProcess] = {}
        self.folder = str(new_temporary_folder("vane-", _roomy_folder()))
        self._guard = Guard(self.folder)
        self._surroundings: tuple[Any, ...] = ()
        self._end = weakref.finalize(
            self, _close, self.processes, self.folder, self._guard, os.getpid()
        )

    @classmethod
    def warm(cls, *settings: Any) -> LocalBackend:
        """The waiting backend, if these are its arguments and surroundings, or else a new one."""
        surroundings = _surroundings((cls, *settings))
        with _waiting_lock:
            backend = _waiting.pop() if _waiting else None
        if backend is not None and backend._surroundings == surroundings:
            processes = backend.processes.items()
            backend._end_workers(name for name, p in processes if p.process.poll() is not None)
            for pool in backend._pool_state.expired_pools(time.monotonic()):
                backend.evicted(pool)
            return backend
        if backend is not None:
            backend._end()
        made = cls(*settings)
        made._surroundings = surroundings
        return made

    def capacity(self) -> Capacity:
        """See `Backend.capacity`."""
        return replace(self._capacity, object_bytes=shutil.disk_usage(self.folder).free)

    def running(self) -> set[str]:
        """See `Backend.running`."""
        return {process.claim.identity for process in self.processes.values()}

    def claims(self, run_id: str) -> Claims:
        """See `Backend.claims`. No other process shares these workers."""
        return Claims()

    def lease(
        self, run_id: str, pools: Sequence[PoolSpec], terms: LeaseTerms | None = None
    ) -> LocalLease:
        """See `Backend.lease`. Nobody else holds leases, so this never waits."""
        claims = tuple(pool.request() for pool in pools)
        id = f"{run_id}-{secrets.token_hex(4)}"
        now = time.monotonic()
        grant = self._pool_state.request_lease(
            LeaseRecord(id, run_id, claims, now), self._nodes, now
        )
        assert grant is not None, f"{names(p.label for p in pools)} do not fit on this machine"
        _end_all([self.processes.pop(name) for name in grant.kill])
        for start in grant.start:
            self._start(start)
        workers = [Worker(n, pool) for pool, ids in grant.workers.items() for n in ids]
        return LocalLease(self, id, pools, workers)

    def _start(self, start: WorkerStart) -> None:
        claim = start.claim
        threads = claim.threads_on(self._capacity.cpus)
        gpus = self._assigned(claim.bundle.get("GPU", 0.0))
        process = self._process(self.folder, claim, threads, gpus, self._guard)
        self.processes[start.worker] = process

    def _assigned(self, amount: float) -> list[str]:
        """The GPUs for a worker. Others may have filled them in another way than was planned."""
        free = dict.fromkeys(self._devices, 1.0)
        for process in self.processes.values():
            for gpu in process.gpus:
                free[gpu] -= min(1.0, process.claim.bundle.get("GPU", 0.0))
        return gpus_for(amount, free)

    def replaced(self, worker: Worker) -> Worker:
        """Replace a dead worker by a new one."""
        process = self.processes.pop(worker.name)
        process.end()
        replacement, start = self._pool_state.replace(worker.name, process.claim, self._nodes)
        assert start is not None, f"worker {worker.name} was replaced twice"
        self._start(start)
        return Worker(replacement, worker.pool)

    def evicted(self, pool: str) -> None:
        """End a pool."""
        self._end_workers(name for name in self.processes if name.startswith(f"{pool}-"))

    def released(self, id: str) -> None:
        """End a lease, and the workers still busy under it."""
        self._end_workers(name for name, process in self.processes.items() if process.is_busy)
        self._pool_state.release(id, time.monotonic())

    def _end_workers(self, names: Iterable[str]) -> None:
        gone = list(names)
        _end_all([self.processes.pop(name) for name in gone])
        self._pool_state.remove_workers(gone)

    def close(self) -> None:
        """Wait for the next run of this process, or end all workers."""
        if not self._surroundings or self._pool_state.leases:
            self._end()
            return
        with _waiting_lock:
            others, _waiting[:] = [*_waiting], [self]
        for other in others:
            other._end()


def _surroundings(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """What workers take over from the process that starts them, and the settings.

    The outputs are files: Dagster's log of a step, a terminal, a notebook's pipe.
    """
    variables = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return settings, os.getpid(), os.getcwd(), variables, _file_of(1), _file_of(2)


def _file_of(descriptor: int) -> object:
    """What tells the file of a descriptor from others; None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_waiting: list[LocalBackend] = []
_waiting_lock = threading.Lock()


def _worker_command() -> list[str]:
    """The command that starts a worker.

    The worker imports from the current folder only if nobody else can write there. ``python -m``
    alone would import another user's modules in a folder such as ``/tmp``.
    """
    unsafe = [] if is_safe_to_import_from(".") else ["-P"]
    return [sys.executable, *unsafe, "-m", serve.__module__]


def _end_all(processes: Sequence[WorkerProcess]) -> None:
    """End processes: those that call servers first, then all servers at the same time."""
    servers = [process for process in processes if process.claim.server]
    for process in processes:
        if not process.claim.server:
            process.end()
    for process in servers:
        process.stop_server()
    for process in servers:
        process.end()


def _close(processes: dict[str, WorkerProcess], folder: str, guard: Guard, owner: int) -> None:
    if os.getpid() != owner:  # a fork of it
        return
    _end_all(list(processes.values()))  # an interrupted run may still change them
    processes.clear()
    shutil.rmtree(folder, ignore_errors=True)
    guard.close()


def _roomy_folder() -> str | None:
    """Shared memory, unless it is as small as in containers; None for the temporary folder."""
    writable = os.access(_SHARED_MEMORY, os.W_OK)
    roomy = writable and shutil.disk_usage(_SHARED_MEMORY).free >= _MIN_BYTES
    return _SHARED_MEMORY if roomy else None


class LocalLease:
    """A lease on pools of subprocesses. See `api.Lease`."""

    def __init__(
        self, backend: LocalBackend, id: str, pools: Sequence[PoolSpec], workers: list[Worker]
    ) -> None:
        self.id = id
        self._backend = backend
        self._pools = {pool.identity: pool for pool in pools}
        self._workers = workers
        self._held: dict[int, Sequence[LocalTable]] = {}
        self._failed: list[CallResult] = []

    def workers(self) -> Sequence[Worker]:
        """See `Lease.workers`."""
        return list(self._workers)

    @property
    def is_called(self) -> bool:
        """Whether a call is not answered yet."""
        return bool(self._failed) or any(p.tickets for p in self._backend.processes.values())

    def load(self, worker: Worker, endpoints: Endpoints) -> int:
        """See `Lease.load`."""
        pool = self._pools[worker.pool]
        threads, env = self._backend.processes[worker.name].threads, forwarded(pool)
        call = LoadCall(pool.model, pool.archive, threads, env, pool.lifecycle, endpoints)
        return self._send(worker, call)

    def announce(self, worker: Worker, endpoints: Endpoints) -> None:
        """See `Lease.announce`."""
        with contextlib.suppress(OSError):  # it has ended, which its next call reports
            process = self._backend.processes[worker.name]
            process.connection.send((0, AnnounceCall(endpoints)))

    def status(self, worker: Worker) -> int:
        """See `Lease.status`."""
        return self._send(worker, "status")

    def run(self, worker: Worker, work: Work, tables: Sequence[LocalTable]) -> int:
        """See `Lease.run`."""
        return self._send(worker, RunCall(work, tuple(t.path for t in tables)), tables)

    def _send(
        self,
        worker: Worker,
        call: LoadCall | RunCall | Literal["status"],
        tables: Sequence[LocalTable] = (),
    ) -> int:
        ticket = next(TICKETS)
        process = self._backend.processes[worker.name]
        try:
            process.connection.send((ticket, call))
            process.tickets[ticket] = call
            self._held[ticket] = tables
        except OSError as error:
            self._failed.append(CallResult(ticket, None, lost=str(error), cause="outside"))
        return ticket

    def wait(self, timeout: float) -> list[CallResult]:
        """See `Lease.wait`."""
        done, self._failed = self._failed, []
        by_connection = {p.connection: p for p in self._backend.processes.values() if p.tickets}
        ready = wait(list(by_connection), 0 if done else timeout)
        for connection in ready:
            assert isinstance(connection, Connection)
            done += self._received(by_connection[connection])
        return done

    def _received(self, process: WorkerProcess) -> list[CallResult]:
        done = []
        try:
            while process.tickets and process.connection.poll():
                reply: WorkerReply = process.connection.recv()
                ticket, report, path = reply
                if isinstance(report, range):
                    process.begun[ticket] = report, time.monotonic()
                    continue
                process.tickets.pop(ticket, None)
                process.begun.pop(ticket, None)
                if self._held.pop(ticket, None) is not None:  # else a former lease asked
                    done.append(CallResult(ticket, report, LocalTable(path) if path else None))
        except (EOFError, OSError):
            lost, cause = process.ending()
            for ticket in sorted(process.tickets):
                self._held.pop(ticket, None)
                at, since = process.begun.get(ticket, (None, 0.0))
                seconds = None if at is None else time.monotonic() - since
                done.append(CallResult(ticket, None, None, lost, cause, seconds, at))
            process.tickets.clear()
        return done

    def fetch(self, table: LocalTable) -> pa.Table:
        """See `RayLease.fetch`. The rows stay in the file, mapped into memory."""
        try:
            return read_table(table.path)
        except FileNotFoundError as error:
            raise TableLostError(str(error)) from error

    def put(self, rows: pa.Table) -> LocalTable:
        """See `RayLease.put`."""
        return LocalTable(write_table(rows, self._backend.folder))

    def replace(self, worker: Worker, at_once: bool = True) -> Worker:
        """See `Lease.replace`. No other run has calls there."""
        lost = f"worker {worker.name} was replaced"
        for ticket in sorted(self._backend.processes[worker.name].tickets):
            self._held.pop(ticket, None)
            self._failed.append(CallResult(ticket, None, lost=lost, cause="outside"))
        fresh = self._backend.replaced(worker)
        self._workers = [fresh if w == worker else w for w in self._workers]
        return fresh

    def moves(self) -> Sequence[tuple[Worker, Worker]]:
        """See `Lease.moves`."""
        return ()

    def evict(self, pool: str) -> None:
        """See `Lease.evict`."""
        self._workers = [worker for worker in self._workers if worker.pool != pool]
        self._backend.evicted(pool)

    def release(self) -> None:
        """See `Lease.release`."""
        self._backend.released(self.id)


def visible_gpus() -> list[str]:
    """This machine's NVIDIA GPUs, limited to CUDA_VISIBLE_DEVICES if it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = (device.strip() for device in visible.split(","))
        return [device for device in devices if device and device != "-1"]
    paths = glob.glob("/dev/nvidia[0-9]*")
    return sorted((path[len("/dev/nvidia") :] for path in paths), key=int)


def own_gpus(wanted: int | None, taken: int) -> list[str]:
    """This machine's GPUs for workers."""
    gpus = visible_gpus() or [str(number) for number in range(taken + (wanted or 0))]
    return gpus[taken:][:wanted]
