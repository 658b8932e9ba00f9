"""Calls and constructors that hang, in code that holds the interpreter lock too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.paths import TESTS
from support.pool_models import until
from support.pools_process import Process
from support.warm_workers import EndingLocal
from vane_dagster.compute import local_guard

ROWS = 4
BAD = 2


def search() -> None:
    re.match("(a+)+b", "a" * 60)


def hang(kind: str) -> None:
    if kind == "sleep":
        time.sleep(600)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # this thread may run on for a moment
    elif kind == "fork":
        os.fork()  # the child holds the worker's connection
        time.sleep(600)
    else:
        search()


class Endless:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self):
        hang(self.kind)


def doubled(batch: pa.Table) -> list[int]:
    return [2 * i for i in batch["id"].to_pylist()]


def plain(batch, kind):
    if BAD in batch["id"].to_pylist():
        hang(kind)
    return {"y": doubled(batch)}


def output(batch, kind):
    return {"y": Endless(kind) if BAD in batch["id"].to_pylist() else doubled(batch)}


async def blocking(batch, kind):
    return plain(batch, kind)


async def stubborn(batch, kind):
    """Does not end when it is cancelled."""
    import asyncio

    while BAD in batch["id"].to_pylist():
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue
    return {"y": doubled(batch)}


class Sick:
    """Hangs when it is asked how it is, the first instance alone."""

    def __init__(self, folder: str) -> None:
        from vane_dagster.worker import health

        health._ANSWER_SECONDS = 1.0
        self.first = not os.path.exists(folder)
        Path(folder).touch()

    def check_health(self) -> None:
        if self.first:
            search()

    def __call__(self, batch):
        if self.first:
            raise ValueError("not now")
        return {"y": doubled(batch)}


def pipeline(tmp_path: Path) -> vd.Pipeline:
    write_source(tmp_path / "source", {"id": pa.array(range(ROWS), pa.int64())})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "source")), id="id")


def add(docs: vd.Pipeline, name: str, fn, **kwargs) -> None:
    given = {"schema": {"y": "BIGINT"}, "batch_size": 2, "version": "1", "concurrency": 1}
    options = {"on_error": "quarantine", "max_error_rate": 0.5, "max_retries": 0}
    docs.map_batches(name, fn, **grouped({**given, **options, **kwargs}))


def published(tmp_path: Path, stage: str) -> list[int]:
    return read_stage(tmp_path / "store", "docs", stage)["y"].to_pylist()


CALLS = {
    "ray": [(plain, "search")],
    "forked": [(plain, "fork")],
    "subprocesses": [
        (plain, "stop"),
        (output, "search"),
        (blocking, "search"),
        (stubborn, "sleep"),
    ],
}
"""The stages of one run, by where their workers are."""


@pytest.mark.parametrize("workers", CALLS)
def test_a_call_that_hangs_is_ended_and_its_row_quarantined(
    workers, tmp_path, local, cluster, materialize, capfd
):
    docs = pipeline(tmp_path)
    for fn, kind in CALLS[workers]:
        more = {"max_concurrency": 4} if fn in (blocking, stubborn) else {}
        add(docs, fn.__name__, fn, fn_kwargs={"kind": kind}, timeout_s=1.5, **more)
    # The end of a worker that forked is seen by its parent, which started it.
    compute = EndingLocal(num_cpus=2) if workers == "forked" else local
    if workers == "ray":
        compute = vd.RayCompute(cluster=cluster)

    materialize(docs, compute)

    log = capfd.readouterr().err
    for stage in docs.stages:
        assert published(tmp_path, stage) == [2 * i for i in range(ROWS) if i != BAD]
        (fault,) = vd.quarantine(f"docs/{stage}", store=str(tmp_path / "store")).to_pylist()
        assert (fault["id"], fault["error"]) == (BAD, "TimeoutError")
        assert "took longer than timeout_s=1.5" in fault["message"]
        assert re.search(f"docs/{stage}.* longer than timeout_s=1.5", log), stage


def test_a_model_that_hangs_when_it_is_asked_is_replaced(tmp_path, local, materialize):
    folder = str(tmp_path / "first")
    docs = pipeline(tmp_path)
    add(docs, "double", Sick, fn_constructor_kwargs={"folder": folder})

    materialize(docs, local)

    assert published(tmp_path, "double") == [2 * i for i in range(ROWS)]


# The mechanism


HEAD = """
import faulthandler, os, re, signal, sys, time
from vane_dagster.worker import lifecycle
from vane_dagster.worker.watchdog import deadline
lifecycle._GRACE_SECONDS = 0.5
def search(): re.match("(a+)+b", "a" * 60)  # holds the interpreter lock
"""


def ended(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + script]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True)


DISTURBED = """
with deadline(0.3):
    faulthandler.dump_traceback_later(100)
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("with deadline(0.2): search()", "in search"),
        ("with lifecycle.Startup().watched(0.2): search()", "in search"),
        (DISTURBED, ""),
        ("with deadline(60), deadline(0.3):\n  with deadline(30): pass\n  search()", "in search"),
    ],
    ids=["a search", "a start that lets nobody answer", "disturbed by user code", "the earliest"],
)
def test_a_deadline_ends_the_process_and_prints_where_it_was(script, printed):
    done = ended(script)
    assert done.returncode < 0
    assert printed in done.stderr


ERRORS = """
import pyarrow as pa
import vane_dagster as vd
from support.udf_calls import row_stage, run_stage

class Hangs(Exception):
    def __str__(self): time.sleep(60)

class Column:
    def __iter__(self): time.sleep(60)

def raises(batch): raise ERROR
async def raises_later(batch): raise ERROR
def raises_for_a_row(id): raise ERROR

given = {"schema": {"y": "BIGINT"}, "on_error": "quarantine", "max_retries": 0, "version": "1"}
stage = row_stage("METHOD", FN, **given, timeout_s=0.3)
run_stage(stage, pa.table({"id": [2, 3]}))
"""


@pytest.mark.parametrize(
    ("method", "fn", "error"),
    [
        ("map_batches", "raises", "vd.errors.RowErrors({0: ValueError()}, {'y': Column()})"),
        ("map_batches", "raises_later", "Hangs()"),
        ("map", "raises_for_a_row", "Hangs()"),
    ],
)
def test_a_deadline_covers_the_handling_of_an_error(method, fn, error):
    done = ended(ERRORS.replace("METHOD", method).replace("ERROR", error).replace("FN", fn))

    assert done.returncode == -(signal.SIGRTMAX - 3), done.stderr


def test_a_deadline_that_was_kept_ends_nothing():
    done = ended(
        "for _ in range(3):\n"
        "  with deadline(0.3): pass\n"
        "with deadline(0.3):\n"
        "  if not (pid := os.fork()): time.sleep(1); os._exit(5)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert done.returncode == 5, done.stderr


# The driver is killed

HANGS = """
import os, re, subprocess, sys, time

def note(folder, *pids):
    with open(os.path.join(folder, "pids.new"), "w") as opened:
        opened.write(" ".join(map(str, pids)))
    os.rename(os.path.join(folder, "pids.new"), os.path.join(folder, "pids"))

class Call:
    def __init__(self, log):
        self.log = log

    def __call__(self, batch):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note(self.log, os.getpid(), child.pid)
        re.match("(a+)+b", "a" * 60)

class Constructor(Call):
    def __init__(self, log):
        self.log = log
        self(None)
"""


@pytest.mark.parametrize("model", ["Call", "Constructor"])
def test_workers_end_with_their_driver(model, tmp_path):
    write_source(tmp_path / "src" / "a", {"id": range(10)})
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "models.py").write_text(HANGS)
    run = Process(tmp_path, {"one": {"model": model}}, "a", local=True)
    pids = tmp_path / "pids"
    until(pids.exists, "the model was called")
    workers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    tables = table_folder(run.process.pid)
    assert tables.is_dir()

    run.kill()

    _, alive = psutil.wait_procs(workers, timeout=30)
    try:
        assert not alive
        until(lambda: not tables.exists(), "its tables are removed")
    finally:
        for process in alive:
            process.kill()


def table_folder(driver: int) -> Path:
    """Return the folder of a driver's tables, which it names to its guard."""
    commands = [child.cmdline() for child in psutil.Process(driver).children()]
    (guard,) = [command for command in commands if local_guard.__file__ in command]
    return Path(guard[-1])
