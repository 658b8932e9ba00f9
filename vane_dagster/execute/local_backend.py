"""Subprocesses as the place where pools live: the same stages with no Ray at all."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import pyarrow as pa

from vane_dagster.execute.admission import check_can_fit
from vane_dagster.execute.backend import Capacity, Done, Worker
from vane_dagster.execute.local_worker import serve
from vane_dagster.execute.pools import Books, Claim
from vane_dagster.execute.work import PoolSpec, Work

_SHARED_MEMORY = "/dev/shm"


class LocalTable:
    """A table in an Arrow file, which goes when nobody refers to it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._end = weakref.finalize(self, _unlink, path)


def _unlink(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


class _Process:
    """A worker process and the driver's end of its socket."""

    def __init__(self, folder: str, claim: Claim, gpus: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if not gpus and not claim.bundle.get("GPU"):
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", serve.__module__, str(theirs.fileno()), folder]
        self.process = subprocess.Popen(
            [*command, str(claim.slots)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.claim = claim
        self.gpus = tuple(gpus)
        self.tickets: set[int] = set()

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class LocalBackend:
    """Pools of subprocesses of this process, warm as long as it lives.

    Args:
        num_cpus: CPUs to use. Default: those of the machine.
        num_gpus: GPUs to use. Default: those of the machine.
        resources: Custom resources.
    """

    def __init__(
        self,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        devices = visible_gpus() if num_gpus is None else list(range(num_gpus))
        cpus = num_cpus or os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._node = {"CPU": cpus, "GPU": len(devices), "memory": memory, **(resources or {})}
        self._devices = devices
        self._books = Books(0.0)
        self._books.settled_at = -1.0
        self.processes: dict[str, _Process] = {}
        base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self.folder = tempfile.mkdtemp(prefix="vane-", dir=base)
        self._end = weakref.finalize(self, _close, self.processes, self.folder)

    def capacity(self) -> Capacity:
        """See `Backend.capacity`."""
        return Capacity((self._node,), shutil.disk_usage(self.folder).free)

    def lease(self, run_id: str, pools: Sequence[PoolSpec]) -> LocalLease:
        """See `Backend.lease`."""
        for pool in pools:
            check_can_fit(self.capacity(), pool)
        claims = [Claim(p.identity, p.label, p.workers, dict(p.bundle), p.slots) for p in pools]
        id = f"{run_id}-{secrets.token_hex(4)}"
        grant = self._books.ask(id, run_id, claims, [self._node], time.monotonic())
        assert grant is not None, "a backend of one run has one lease at a time"
        for name in grant.kill:
            self.processes.pop(name).end()
        for name, claim in grant.create:
            self.start(name, claim)
        workers = [
            Worker(n, c.identity) for c in claims for n in self._books.pools[c.identity].workers
        ]
        return LocalLease(self, id, pools, workers)

    def start(self, name: str, claim: Claim) -> None:
        """Starts a worker process."""
        self.processes[name] = _Process(self.folder, claim, self._assigned(claim))

    def _assigned(self, claim: Claim) -> list[int]:
        """The GPUs with the most room for a claim."""
        amount = claim.bundle.get("GPU", 0.0)
        used = dict.fromkeys(self._devices, 0.0)
        for process in self.processes.values():
            share = process.claim.bundle.get("GPU", 0.0) / max(1, len(process.gpus))
            for gpu in process.gpus:
                used[gpu] += share
        free = sorted(used, key=lambda gpu: used[gpu])
        return free[: max(1, int(amount))] if amount else []

    def replaced(self, worker: Worker) -> Worker:
        """A fresh worker in place of a dead one."""
        self.processes.pop(worker.name).end()
        replacement = self._books.replace(worker.name)
        assert replacement is not None, f"no worker {worker.name}"
        self.start(*replacement)
        return Worker(replacement[0], worker.pool)

    def evicted(self, pool: str) -> None:
        """Ends a pool."""
        names = [name for name in self.processes if name.startswith(f"{pool}-")]
        for name in names:
            self.processes.pop(name).end()
        self._books.forget(names)

    def released(self, id: str) -> None:
        """Ends a lease; workers that still do something under it are ended too."""
        for name, process in list(self.processes.items()):
            if process.tickets:
                self.processes.pop(name).end()
                self._books.forget([name])
        self._books.release(id, time.monotonic())

    def close(self) -> None:
        """Ends all workers."""
        self._end()


def _close(processes: dict[str, _Process], folder: str) -> None:
    for process in processes.values():
        process.end()
    processes.clear()
    shutil.rmtree(folder, ignore_errors=True)


class LocalLease:
    """A lease on pools of subprocesses. See `backend.Lease`."""

    def __init__(
        self, backend: LocalBackend, id: str, pools: Sequence[PoolSpec], workers: list[Worker]
    ) -> None:
        self.id = id
        self._backend = backend
        self._pools = {pool.identity: pool for pool in pools}
        self._workers = workers
        self._held: dict[int, Sequence[Any]] = {}
        self._failed: list[Done] = []
        self._tickets = 0

    def workers(self) -> Sequence[Worker]:
        """See `Lease.workers`."""
        return list(self._workers)

    def load(self, worker: Worker) -> int:
        """See `Lease.load`."""
        pool = self._pools[worker.pool]
        threads = pool.threads or self._share(pool)
        return self._send(worker, "load", (pool.model, pool.archive, threads, {}), ())

    def _share(self, pool: PoolSpec) -> int:
        cpus = self._backend.capacity().cpus
        return int(pool.bundle.get("CPU", 0)) or max(1, cpus // pool.workers[1])

    def run(self, worker: Worker, work: Work, tables: Sequence[LocalTable]) -> int:
        """See `Lease.run`."""
        return self._send(worker, "run", (work, *(t.path for t in tables)), tables)

    def _send(self, worker: Worker, method: str, args: Any, tables: Sequence[Any]) -> int:
        self._tickets += 1
        process = self._backend.processes[worker.name]
        try:
            process.connection.send((self._tickets, method, args))
            process.tickets.add(self._tickets)
            self._held[self._tickets] = tables
        except (BrokenPipeError, ConnectionError) as error:
            self._failed.append(Done(self._tickets, None, lost=str(error), worker_lost=True))
        return self._tickets

    def wait(self, timeout: float) -> list[Done]:
        """See `Lease.wait`."""
        done, self._failed = self._failed, []
        by_connection = {p.connection: p for p in self._backend.processes.values() if p.tickets}
        ready = wait(list(by_connection), 0 if done else timeout)
        for connection in ready:
            assert isinstance(connection, Connection)
            done += self._received(by_connection[connection])
        return done

    def _received(self, process: _Process) -> list[Done]:
        done = []
        try:
            while process.tickets and process.connection.poll():
                ticket, report, path = process.connection.recv()
                process.tickets.discard(ticket)
                self._held.pop(ticket, None)
                done.append(Done(ticket, report, LocalTable(path) if path else None))
        except (EOFError, ConnectionError, pa.ArrowException):
            code = process.process.wait()
            lost = f"worker process {process.process.pid} ended with exit code {code}"
            done += [Done(t, None, lost=lost, worker_lost=True) for t in process.tickets]
            process.tickets.clear()
        return done

    def replace(self, worker: Worker) -> Worker:
        """See `Lease.replace`."""
        fresh = self._backend.replaced(worker)
        self._workers = [fresh if w == worker else w for w in self._workers]
        return fresh

    def evict(self, pool: str) -> None:
        """See `Lease.evict`."""
        self._backend.evicted(pool)

    def release(self) -> None:
        """See `Lease.release`."""
        self._backend.released(self.id)


def visible_gpus() -> list[int]:
    """Indexes of this machine's NVIDIA GPUs, within CUDA_VISIBLE_DEVICES where it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(device) for device in visible.split(",") if device.strip().isdigit()]
    return sorted(int(path[len("/dev/nvidia") :]) for path in glob.glob("/dev/nvidia[0-9]*"))
