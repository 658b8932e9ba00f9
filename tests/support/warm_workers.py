"""Subprocesses that start fast, and whose I/O workers stay warm from test to test.

Models end with each run, as with any `LocalCompute`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import vane_dagster as vd
from support import forked
from vane_dagster.compute.api import IO_WORKERS, Backend
from vane_dagster.compute.local_backend import LocalBackend


class _Surroundings(NamedTuple):
    """What a worker takes over from the process that starts it; `imports` while it imports."""

    imports: tuple[str, dict[str, str]]
    variables: dict[str, str]


_KEPT = 3  # backends

_idle: dict[Any, LocalBackend] = {}
_made_for: WeakKeyDictionary[LocalBackend, Any] = WeakKeyDictionary()
_session: _Surroundings | None = None
_imported = forked.WORKER


class WarmLocal(vd.LocalCompute):
    """A `LocalCompute` whose processes are forked, and whose I/O workers serve the next test too.

    Workers have the environment and the current folder of the run that started them: they serve
    runs with the same ones. A run beside another has I/O workers of its own.
    """

    def backend(self, warn: Callable[[str], None]) -> Backend:
        now = _surroundings()
        if _session is None or now.imports != _session.imports:
            return super().backend(warn)
        if warm := _idle.pop(self._kind(now), None):
            return warm
        made = LocalBackend(self.num_cpus, self.num_gpus, self.resources, start_forked)
        _made_for[made] = self._kind(now)
        return made

    def close(self, backend: Backend) -> None:
        assert isinstance(backend, LocalBackend)
        for pool in {name.rpartition("-")[0] for name in backend.processes} - {IO_WORKERS}:
            backend.evicted(pool)
        ended = any(process.process.poll() is not None for process in backend.processes.values())
        kind = self._kind(_surroundings())
        if ended or _made_for.get(backend) != kind or kind in _idle:
            super().close(backend)
            return
        _idle[kind] = backend
        if len(_idle) > _KEPT:
            _idle.pop(next(iter(_idle))).close()

    def _kind(self, surroundings: _Surroundings) -> Any:
        capacity = self.num_cpus, self.num_gpus, frozenset(self.resources.items())
        return capacity, frozenset(surroundings.variables.items()), surroundings.imports[0]


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


@contextlib.contextmanager
def workers_that_imported(*modules: str) -> Iterator[None]:
    """Fork workers from a process that has imported further modules."""
    global _imported
    before, _imported = _imported, (*forked.WORKER, *modules)
    yield
    _imported = before


def start_forked(command: Sequence[str], descriptor: int, env: Mapping[str, str]) -> forked.Forked:
    """Fork a worker instead of starting it."""
    return forked.server(_imported).start(command[1:], env, {descriptor: descriptor})


def _surroundings() -> _Surroundings:
    variables = dict(os.environ)
    for name in os.environ:
        if name.startswith(("PYTEST_", "RAY_")) or name == "PYTHONBREAKPOINT":
            del variables[name]  # set by pytest and `ray.init`
    python = {name: value for name, value in variables.items() if name.startswith("PYTHON")}
    return _Surroundings((os.getcwd(), python), variables)
