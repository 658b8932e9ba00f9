"""Subprocesses that start fast, and whose I/O workers stay warm from test to test.

Models end with each run, as with any `LocalCompute`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import vane_dagster as vd
from support.forked_workers import ForkServer
from vane_dagster.compute.api import IO_WORKERS, Backend
from vane_dagster.compute.local_backend import LocalBackend

_idle: dict[Any, LocalBackend] = {}
_session: Any = None
_fork_server: ForkServer | None = None


class WarmLocal(vd.LocalCompute):
    """A `LocalCompute` whose processes are forked, and whose I/O workers serve the next test too.

    Workers have the environment and the current folder of the run that started them: a test that
    changes either has workers of its own, as has a run beside another.
    """

    def backend(self, warn: Callable[[str], None]) -> Backend:
        global _fork_server
        if _surroundings() != _session:
            return super().backend(warn)
        if warm := _idle.pop(self._capacity(), None):
            return warm
        _fork_server = _fork_server or ForkServer()
        return LocalBackend(self.num_cpus, self.num_gpus, self.resources, _fork_server.start)

    def close(self, backend: Backend) -> None:
        assert isinstance(backend, LocalBackend)
        for pool in {name.rpartition("-")[0] for name in backend.processes} - {IO_WORKERS}:
            backend.evicted(pool)
        ended = any(process.process.poll() is not None for process in backend.processes.values())
        if ended or _surroundings() != _session or self._capacity() in _idle:
            super().close(backend)
        else:
            _idle[self._capacity()] = backend

    def _capacity(self) -> Any:
        return self.num_cpus, self.num_gpus, frozenset(self.resources.items())


@contextlib.contextmanager
def kept_warm() -> Iterator[None]:
    """Keep I/O workers warm between runs in these surroundings, and end them afterwards."""
    global _session, _fork_server
    _session = _surroundings()
    yield
    _session = None
    while _idle:
        _idle.popitem()[1].close()
    if _fork_server:
        _fork_server.close()
        _fork_server = None


def _surroundings() -> Any:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return os.getcwd(), own
