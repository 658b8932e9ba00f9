"""Subprocesses that start fast, and whose I/O workers stay warm from test to test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import vane_dagster as vd
from support import forked
from vane_dagster.compute import local_backend
from vane_dagster.compute.api import IO_WORKERS, Backend
from vane_dagster.compute.local_backend import LocalBackend, WorkerProcess

_session: dict[str, str] | None = None
_imported = forked.WORKER


class ForkedProcess(WorkerProcess):
    def _started(
        self, command: Sequence[str], descriptor: int, env: Mapping[str, str]
    ) -> forked.Forked:
        return forked.server(_imported).start(command[1:], env, {descriptor: descriptor})


class ForkedBackend(LocalBackend):
    _process = ForkedProcess


class EndingLocal(vd.LocalCompute):
    """A `LocalCompute` whose workers end with each run, as with the last run of a process."""

    def close(self, backend: Backend) -> None:
        super().close(backend)
        end_waiting()


class ForkedLocal(vd.LocalCompute):
    def backend(self) -> Backend:
        if _session is None or _surroundings() != _session:
            return super().backend()
        return ForkedBackend.warm(self.num_cpus, self.num_gpus, self.resources)


class WarmLocal(ForkedLocal):
    """Its models end with each run, and its I/O workers serve the next test too."""

    def close(self, backend: Backend) -> None:
        assert isinstance(backend, LocalBackend)
        for pool in {name.rpartition("-")[0] for name in backend.processes} - {IO_WORKERS}:
            backend.evicted(pool)
        super().close(backend)


@contextlib.contextmanager
def kept_warm() -> Iterator[None]:
    """Keep I/O workers warm between runs in these surroundings, and end them afterwards."""
    global _session
    _session = _surroundings()
    yield
    _session = None
    end_waiting()
    forked.close_servers()


@contextlib.contextmanager
def workers_that_imported(*modules: str) -> Iterator[None]:
    """Fork workers from a process that has imported further modules."""
    global _imported
    before, _imported = _imported, (*forked.WORKER, *modules)
    yield
    _imported = before


def end_waiting() -> None:
    """End the workers that wait for the next run of this process."""
    while local_backend._waiting:
        local_backend._waiting.pop()._end()


def waiting_models() -> list[WorkerProcess]:
    """The workers with models that wait for the next run of this process."""
    (backend,) = local_backend._waiting
    return [p for p in backend.processes.values() if p.claim.identity != IO_WORKERS]


def _surroundings() -> dict[str, str]:
    """What a forked worker would have needed while it imported."""
    python = {n: v for n, v in os.environ.items() if n.startswith("PYTHON")}
    python.pop("PYTHONBREAKPOINT", None)  # set by pytest
    return python
