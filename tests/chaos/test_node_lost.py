"""A node of the cluster is lost with its workers and its tables: the run goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.data import read_stage, write_source
from support.heads import ENTRY, head
from support.pool_models import noted, until
from support.pools_process import Process

ROWS = 400


@contextlib.contextmanager
def node(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of a cluster, in a session of its own."""
    command = [sys.executable, "-c", ENTRY, "start", f"--address={address}", "--block"]
    command += ["--num-cpus=1", '--resources={"extra": 1}', "--object-store-memory=100000000"]
    command += ["--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    started = subprocess.Popen(
        command,
        env={**kept, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert started.stdout is not None
    try:
        output = b""
        while b"Ray runtime started" not in output:
            line = started.stdout.readline()
            assert line, output.decode()
            output += line
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        started.stdout.close()


@pytest.fixture
def cluster_of_three() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A cluster's address, and one of its nodes."""
    folder = Path(tempfile.mkdtemp(prefix="vn-", dir="/tmp"))
    with head(folder) as cluster, node(cluster.address) as first, node(cluster.address):
        yield cluster.address, first
    shutil.rmtree(folder, ignore_errors=True)


def test_a_node_is_lost_with_its_workers_and_tables(cluster_of_three, tmp_path):
    address, lost = cluster_of_three
    write_source(tmp_path / "src" / "a", {"id": range(ROWS)}, row_group_size=20)
    given = {"batch_size": 5, "columns": None}
    on_nodes = {**given, "resources": {"extra": 1}, "concurrency": [1, 2]}
    stages = {
        "one": {**on_nodes, "fn_constructor_kwargs": {"sleep": 0.1}},
        "two": {**given, "fn_constructor_kwargs": {"sleep": 0.05}},
    }
    run = Process(tmp_path, stages, "a", address=address)
    until(lambda: len(noted(tmp_path / "calls")) >= 100, "it computes", 90)

    os.killpg(lost.pid, signal.SIGKILL)

    run.done()
    for stage in ("one", "two"):
        rows = read_stage(tmp_path / "store", "docs", stage, "a").sort_by("id")
        assert rows["id"].to_pylist() == list(range(ROWS))
    assert "was lost" in run.output


def test_a_row_is_not_blamed_for_the_nodes_that_are_lost_with_it(cluster_of_three, tmp_path):
    """Whole machines are lost: Ray calls their nodes alive for many seconds more."""
    address, _ = cluster_of_three
    write_source(tmp_path / "src" / "a", {"id": [1]})
    row = {"batch_size": 1, "resources": {"extra": 1}, "max_error_rate": 1.0}
    stage = {**row, "on_error": "quarantine", "fn_constructor_kwargs": {"sleep": 5.0}}
    with node(address):
        run = Process(tmp_path, {"one": stage}, "a", address=address)
        for lost in range(2):
            until(lambda n=lost: len(noted(tmp_path / "calls")) > n, "the row is sent again", 120)
            machine = os.getsid(noted(tmp_path / "loads")[-1])
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    if os.getsid(process.pid) == machine:
                        process.kill()
        run.done()
    assert read_stage(tmp_path / "store", "docs", "one", "a")["id"].to_pylist() == [1]
    assert len(noted(tmp_path / "calls")) == 3
