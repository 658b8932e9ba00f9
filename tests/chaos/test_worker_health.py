"""Workers that start for too long, whose model is dead while they live, or that grow too large."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage
from support.pool_models import alive, until
from support.results import failure, metadata
from support.unhealthy import ROWS, noted, pipeline


def pids(folder: Path, name: str) -> Counter[str]:
    return Counter((folder / name).read_text().split())


def doubled(batch: pa.Table) -> pa.Table:
    xs = batch["x"].to_pylist()
    return pa.table({"y": [2 * x for x in xs], "pid": [os.getpid()] * len(xs)})


def waits_for_its_weights() -> None:
    while True:
        time.sleep(0.1)


class Stuck:
    def __init__(self, folder: str) -> None:
        noted(folder, "loads")
        waits_for_its_weights()

    def __call__(self, batch):
        return doubled(batch)


class Engine:
    """Its first instance is dead after some calls, and says so when it is asked."""

    def __init__(self, folder: str, calls: int = 3) -> None:
        self.folder, self.left = folder, calls
        self.first = noted(folder, "loads") == 1

    @property
    def dead(self) -> bool:
        return self.first and self.left < 0

    def check_health(self) -> None:
        noted(self.folder, "probes")
        if self.dead or os.path.exists(os.path.join(self.folder, f"dead-{os.getpid()}")):
            raise RuntimeError("the engine is gone")

    def __call__(self, batch):
        self.left -= 1
        if self.dead:
            raise ValueError("no answer")
        return doubled(batch)


class Device:
    """After a poison row, each call fails as CUDA does when a kernel has failed in the process."""

    def __init__(self, folder: str, poison: int = 77) -> None:
        noted(folder, "loads")
        self.poison, self.lost = poison, False

    def __call__(self, batch):
        self.lost = self.lost or self.poison in batch["x"].to_pylist()
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return doubled(batch)


class Silent:
    """Its first instance fails from some call on, and nothing tells that it is dead."""

    def __init__(self, folder: str, calls: int) -> None:
        self.first, self.left = noted(folder, "loads") == 1, calls

    def __call__(self, batch):
        self.left -= 1
        if self.first and self.left < 0:
            raise ValueError("not now")
        return doubled(batch)


class Leaks:
    def __init__(self, folder: str, size: int) -> None:
        noted(folder, "loads")
        self.size, self.kept = size, [b""]

    def __call__(self, batch):
        self.kept.append(b"x" * self.size)
        return doubled(batch)


def read(tmp_path: Path) -> pa.Table:
    return read_stage(tmp_path / "store", "docs", "double")


# A start that takes too long


def test_a_start_that_takes_too_long_tells_where_it_is(tmp_path, cluster, materialize):
    compute = vd.RayCompute(cluster=cluster)
    docs = pipeline(tmp_path, Stuck, startup_timeout_s=3)

    message = failure(materialize(docs, compute, raises=False))

    assert "Stuck was not constructed within 3 seconds" in message
    assert "raise startup_timeout_s" in message
    assert "in waits_for_its_weights" in message
    assert "local_worker.py" not in message
    assert "threading.py" not in message
    pid = int((tmp_path / "loads").read_text())
    until(lambda: not alive(pid), "the worker ends")


def test_a_start_that_lets_nobody_answer_ends_its_process():
    script = """
import re, sys
from vane_dagster.worker import lifecycle
lifecycle._GRACE_SECONDS = 1.0
def search():
    re.match("(a+)+b", "a" * 60)  # holds Python's lock for ages
with lifecycle.Startup().watched(0.5):
    search()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode < 0
    assert "in search" in done.stderr


# A model that is dead while its process lives


def test_an_engine_that_says_it_is_dead_is_replaced(tmp_path, local, materialize):
    materialize(pipeline(tmp_path, Engine), local)

    assert read(tmp_path)["y"].to_pylist() == [2 * x for x in range(ROWS)]
    assert len(pids(tmp_path, "loads")) == 2
    assert len(pids(tmp_path, "probes")) >= 1


def test_a_warm_model_that_is_dead_by_the_next_run_is_replaced(tmp_path, cluster, materialize):
    compute = vd.RayCompute(cluster=cluster)
    docs = pipeline(tmp_path, Engine, {"calls": 10**6})
    materialize(docs, compute)
    (pid,) = set(read(tmp_path)["pid"].to_pylist())
    (tmp_path / f"dead-{pid}").touch()

    materialize(docs, compute, config={"force": True})

    assert pid not in read(tmp_path)["pid"].to_pylist()
    assert read(tmp_path)["y"].to_pylist() == [2 * x for x in range(ROWS)]
    assert len(pids(tmp_path, "loads")) == 2


def test_of_a_lost_device_only_the_row_that_broke_it_is_set_aside(tmp_path, local, materialize):
    docs = pipeline(tmp_path, Device, on_error="quarantine", max_error_rate=0.1)

    materialize(docs, local)

    assert read(tmp_path)["y"].to_pylist() == [2 * x for x in range(ROWS) if x != 77]
    aside = vd.quarantine("docs/double", store=str(tmp_path / "store"))
    assert aside["id"].to_pylist() == [77]
    assert aside["error"].to_pylist() == ["WorkerDied"]
    assert "device-side assert" in aside["message"][0].as_py()
    assert len(pids(tmp_path, "loads")) > 2


def test_a_lost_device_fails_the_partition_with_what_was_raised(tmp_path, local, materialize):
    message = failure(materialize(pipeline(tmp_path, Device), local, raises=False))

    assert "lost its worker or its data 4 times" in message
    assert "CUDA error: device-side assert triggered" in message
    assert 'raise RuntimeError("CUDA error' in message


def test_failures_at_fragments_in_a_row_replace_the_worker(tmp_path, local, materialize):
    options = {"on_error": "quarantine", "max_error_rate": 1.0, "concurrency": 1}
    docs = pipeline(tmp_path, Silent, {"calls": 8}, **options)

    result = materialize(docs, local)

    assert len(pids(tmp_path, "loads")) == 2
    aside = metadata(result, "double")["rows_quarantined"]
    assert 0 < aside <= 3 * 20
    assert read(tmp_path).num_rows == ROWS - aside

    materialize(docs, local, config={"retry_quarantined": True})
    assert read(tmp_path)["y"].to_pylist() == [2 * x for x in range(ROWS)]


# Workers that are made anew


def test_a_worker_is_replaced_after_so_many_batches(tmp_path, local, materialize):
    docs = pipeline(tmp_path, Engine, {"calls": 10**6}, max_batches=5)

    materialize(docs, local)

    rows = read(tmp_path)
    assert rows["y"].to_pylist() == [2 * x for x in range(ROWS)]
    batches = {pid: rows / 10 for pid, rows in Counter(rows["pid"].to_pylist()).items()}
    assert len(batches) >= 3
    assert max(batches.values()) <= 2 * 5  # what it had queued is done too
    assert len(pids(tmp_path, "loads")) >= len(batches)


def test_a_worker_that_leaks_is_replaced(tmp_path, local, materialize):
    size = 100 << 20
    docs = pipeline(tmp_path, Leaks, {"size": size}, max_rss=(600 << 20), batch_size=20)

    materialize(docs, local)

    rows = read(tmp_path)
    assert rows["y"].to_pylist() == [2 * x for x in range(ROWS)]
    assert len(set(rows["pid"].to_pylist())) >= 2


def test_a_limit_that_a_fresh_worker_is_beyond(tmp_path, local, materialize):
    docs = pipeline(tmp_path, Leaks, {"size": 1}, max_rss=1 << 20)

    message = failure(materialize(docs, local, raises=False))

    assert re.search(r"Leaks: its worker holds \d+ MiB of memory, max_rss=1 MiB", message)
    assert "Raise max_rss" in message
