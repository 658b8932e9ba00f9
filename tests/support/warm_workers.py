"""Subprocesses that start fast, and whose I/O workers stay warm from test to test.

Models end with each run, as with any `LocalCompute`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import vane_dagster as vd
from support import forked
from vane_dagster.compute.api import IO_WORKERS, Backend
from vane_dagster.compute.local_backend import LocalBackend


class _Surroundings(NamedTuple):
    """What a worker takes over from the process that starts it; `imports` while it imports."""

    imports: tuple[str, dict[str, str]]
    variables: dict[str, str]


_idle: dict[Any, LocalBackend] = {}
_session: _Surroundings | None = None


class WarmLocal(vd.LocalCompute):
    """A `LocalCompute` whose processes are forked, and whose I/O workers serve the next test too.

    Workers have the environment and the current folder of the run that started them: a test that
    changes either has I/O workers of its own, as has a run beside another.
    """

    def backend(self, warn: Callable[[str], None]) -> Backend:
        now = _surroundings()
        if _session is None or now.imports != _session.imports:
            return super().backend(warn)
        if now == _session and (warm := _idle.pop(self._capacity(), None)):
            return warm
        return LocalBackend(self.num_cpus, self.num_gpus, self.resources, start_forked)

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
    global _session
    _session = _surroundings()
    yield
    _session = None
    while _idle:
        _idle.popitem()[1].close()
    forked.close_servers()


def start_forked(command: Sequence[str], descriptor: int, env: Mapping[str, str]) -> forked.Forked:
    """Fork a worker instead of starting it."""
    return forked.server(forked.WORKER).start(command[1:], env, {descriptor: descriptor})


def _surroundings() -> _Surroundings:
    variables = dict(os.environ)
    for name in os.environ:
        if name.startswith(("PYTEST_", "RAY_")) or name == "PYTHONBREAKPOINT":
            del variables[name]  # set by pytest and `ray.init`
    python = {name: value for name, value in variables.items() if name.startswith("PYTHON")}
    return _Surroundings((os.getcwd(), python), variables)
