"""Subprocesses wait for the next run of their process, and end with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata
from support.warm_workers import ForkedLocal, end_waiting
from vane_dagster.compute import local_backend


class Model:
    """Says which process computed a row, and what it had found in its environment."""

    def __call__(self, batch: Any) -> dict[str, list[Any]]:
        found = os.environ.get("FOUND", "")
        return {"pid": [os.getpid()] * len(batch), "found": [found] * len(batch)}


class Runs:
    """Runs of a stage, each over all rows."""

    def __init__(self, folder: Path, materialize: Any) -> None:
        write_source(folder / "src", {"id": range(10)})
        self._folder, self._materialize = folder, materialize

    def __call__(self, compute: vd.LocalCompute | None = None) -> tuple[int, int]:
        """The model loads, and the process of a run."""
        docs = vd.Pipeline("docs", source=vd.parquet(str(self._folder / "src")), id="id")
        schema = {"pid": "BIGINT", "found": "VARCHAR"}
        docs.map_batches("out", Model, schema=schema, concurrency=1, reuse="none")
        compute = compute or ForkedLocal(num_cpus=2)
        result = self._materialize(docs, compute, config={"force": True})
        self.rows = read_stage(self._folder / "store", "docs", "out").to_pylist()
        (pid,) = {row["pid"] for row in self.rows}
        return metadata(result, "out")["model_loads"], pid


@pytest.fixture
def runs(tmp_path: Path, materialize: Any) -> Iterator[Runs]:
    end_waiting()
    yield Runs(tmp_path, materialize)
    end_waiting()


def is_gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    (backend,) = local_backend._waiting
    [process.process.wait() for process in backend.processes.values() if process.process.pid == pid]


def idle_for_ten_minutes(pid: int) -> None:
    (backend,) = local_backend._waiting
    for pool in backend._pool_state.pools.values():
        pool.idle_since -= 601


def test_a_model_is_loaded_once_for_all_runs_of_a_process(runs, monkeypatch):
    """Unless its worker was killed, is idle for long, or the variables or resources differ."""
    loads, pid = runs()
    assert (loads, runs()) == (1, (0, pid))
    for change, compute in (
        (killed, None),
        (idle_for_ten_minutes, None),
        (lambda pid: monkeypatch.setenv("FOUND", "something"), None),
        (lambda pid: None, ForkedLocal(num_cpus=3)),
    ):
        change(pid)
        loads, other = runs(compute)
        assert loads == 1
        assert other != pid
        assert is_gone(pid)
        pid = other
    assert {row["found"] for row in runs.rows} == {"something"}


def test_a_fork_of_the_process_ends_nothing(runs):
    _, pid = runs()
    if (child := os.fork()) == 0:
        try:
            end_waiting()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert runs() == (0, pid)
