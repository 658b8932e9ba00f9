"""Subprocesses wait for the next run of their process, unless something of their model changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.edits import Project
from support.pool_models import alive, until
from support.results import metadata
from support.warm_workers import ForkedLocal, end_waiting
from vane_dagster.compute import local_backend

SCHEMA = {"id": "BIGINT", "out": "BIGINT", "pid": "BIGINT", "found": "VARCHAR", "loaded": "DOUBLE"}
ROWS = 20
MODELS = """
import os
import sqlite3
import time

import helpers

FACTOR = 2


class Model:
    def __init__(self):
        self.loaded = time.time()
        self.database = sqlite3.connect(":memory:")  # of one thread

    def made(self, n):
        return FACTOR * n + helpers.more(n)

    def __call__(self, batch):
        ids = batch["id"].to_pylist()
        self.database.execute("SELECT 1")
        own = {"pid": [os.getpid()] * len(ids), "found": [os.environ.get("FOUND")] * len(ids)}
        own["loaded"] = [self.loaded] * len(ids)
        return {"id": ids, "out": [self.made(n) for n in ids], **own}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = Project(tmp_path / "models")
    monkeypatch.syspath_prepend(str(made.root))
    made.write(models=MODELS, helpers="def more(n):\n    return 100\n")
    write_source(tmp_path / "src", {"id": range(ROWS)})
    end_waiting()
    yield made
    made.forget()
    end_waiting()


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    (backend,) = local_backend._waiting
    [process.process.wait() for process in backend.processes.values() if process.process.pid == pid]


def idle_for_ten_minutes(pid: int) -> None:
    (backend,) = local_backend._waiting
    for pool in backend._pool_state.pools.values():
        pool.idle_since -= 601


def test_a_model_is_loaded_once_for_the_runs_of_a_process(
    project, tmp_path, materialize, monkeypatch
):
    def run(cpus: int = 2, force: bool = True) -> tuple[list[Any], int]:
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id")
        model = project.load("Model", "models")
        docs.map_batches("out", model, schema=SCHEMA, batch_size=5, concurrency=1)
        config = {"force": True} if force else None
        result = materialize(docs, ForkedLocal(num_cpus=cpus), config=config)
        found = metadata(result, "out")
        assert found["fragments_computed"] == 1
        assert found["model_loads"] == 1 - found["warm_hits"]
        rows = read_stage(tmp_path / "store", "docs", "out").sort_by("id").to_pylist()
        ((pid, told),) = {(row["pid"], row["found"]) for row in rows}
        assert told == os.environ.get("FOUND")
        return [row["out"] for row in rows], (found["model_loads"], pid)

    def expected(factor: int, times: int = 1, more: int = 100) -> list[int]:
        return [times * (factor * n + more) for n in range(ROWS)]

    out, (loads, pid) = run()
    assert (out, loads) == (expected(2), 1)
    assert run() == (expected(2), (0, pid))

    # A fork of the process ends nothing.
    if (child := os.fork()) == 0:
        try:
            end_waiting()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert run()[1] == (0, pid)

    # Its worker was killed or is idle for long; variables or resources differ; its code was edited.
    edit = project.edit
    for cpus, force, change, values in (
        (2, True, killed, expected(2)),
        (2, True, idle_for_ten_minutes, expected(2)),
        (2, True, lambda pid: monkeypatch.setenv("FOUND", "something"), expected(2)),
        (3, True, lambda pid: None, expected(2)),
        (3, False, lambda pid: edit("models.py", "FACTOR = 2", "FACTOR = 3"), expected(3)),
        (3, False, lambda pid: edit("models.py", "[self", "[10 * self"), expected(3, 10)),
        (3, False, lambda pid: edit("helpers.py", "100", "200"), expected(3, 10, 200)),
        (3, True, lambda pid: edit("models.py", "= 3", "= 3  # a comment"), expected(3, 10, 200)),
    ):
        change(pid)
        out, (loads, other) = run(cpus, force)
        assert (out, loads) == (values, 1)
        assert other != pid
        if values == expected(2):  # an edit leaves the former pool to its idle time
            until(lambda gone=pid: not alive(gone), "the former worker ends", 10)
        pid = other
    assert run(3)[1] == (0, pid)


def test_a_preview_of_an_edited_class_uses_the_loaded_instance(project, tmp_path):
    def preview(**given: Any) -> tuple[list[int], int]:
        docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id")
        docs.map_batches("out", project.load("Model", "models"), schema=SCHEMA)
        rows = docs["out"].preview(3, **given).table
        return rows["out"].to_pylist(), rows["loaded"][0].as_py()

    out, loaded = preview()
    assert out == [100, 102, 104]
    project.edit("models.py", "return FACTOR * n", "return 5 * n")
    assert preview() == ([100, 105, 110], loaded)
    out, again = preview(reload=True)
    assert (out, again) == ([100, 105, 110], again)
    assert again != loaded
