"""A node of the cluster is lost with its workers and its tables: the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import read_stage, write_source
from pools_process import Process

from vane_dagster.execute.cluster import Head, LocalHead

CLUSTER = {"name": "nodes", "num_cpus": 1}
ROWS = 400


def add_node(local: LocalHead, head: Head) -> subprocess.Popen[bytes]:
    """A second Ray node, in a session of its own under the head's mark."""
    command = [
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        f"--address={head.address}",
    ]
    command += ["--num-cpus=1", '--resources={"extra": 1}', "--object-store-memory=100000000"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--block"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    node = subprocess.Popen(
        command,
        env={
            **local._environment(),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "PYTHONUNBUFFERED": "1",
        },
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert node.stdout is not None
    said = b""
    while b"Ray runtime started" not in said:
        line = node.stdout.readline()
        assert line, said.decode()
        said += line
    return node


@pytest.fixture
def nodes() -> Iterator[list[subprocess.Popen[bytes]]]:
    local = LocalHead(**CLUSTER)
    started: list[subprocess.Popen[bytes]] = []
    try:
        head = local.ensure()
        for _ in range(2):
            started.append(add_node(local, head))
        yield started
    finally:
        local.stop()
        for node in started:
            node.communicate()


def test_a_node_is_lost_with_its_workers_and_tables(nodes, tmp_path):
    write_source(tmp_path / "src" / "a", {"id": range(ROWS)}, row_group_size=20)
    placed = {"resources": {"extra": 1}, "batch_size": 5, "columns": None}
    slow = {"fn_constructor_kwargs": {"sleep": 0.1}}
    stages = {
        "one": {**placed, "concurrency": [1, 2], **slow},
        "two": {"batch_size": 5, "columns": None, "fn_constructor_kwargs": {"sleep": 0.05}},
    }
    run = Process(tmp_path, stages, "a", cluster=CLUSTER)
    calls = tmp_path / "calls"
    deadline = time.monotonic() + 90
    while not calls.exists() or len(calls.read_text().split()) < 100:
        assert time.monotonic() < deadline, "nothing was computed"
        assert run.process.poll() is None, run.failed()
        time.sleep(0.05)

    os.killpg(nodes[0].pid, signal.SIGKILL)

    run.done()
    for stage in ("one", "two"):
        rows = read_stage(Path(tmp_path) / "store", "docs", stage, "a").sort_by("id")
        assert rows["id"].to_pylist() == list(range(ROWS))
    assert "was lost" in run.said
