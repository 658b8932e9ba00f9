"""A node of the cluster is lost with its workers and its tables: the run goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import psutil
import pytest

from support.data import read_stage, write_source
from support.heads import ENTRY, START, head
from support.pool_models import alive, noted, until
from support.pools_process import Process

ROWS = 400


@contextlib.contextmanager
def node(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of a cluster, in a session of its own."""
    command = [*START, f"--address={address}", "--num-cpus=1", '--resources={"extra": 1}']
    command += ["--object-store-memory=100000000"]
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


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a head, to which each test adds nodes."""
    with head() as cluster:
        yield cluster.address


@pytest.fixture
def nodes(address: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with node(address) as first, node(address) as second:
        yield [first, second]


def test_a_row_is_not_blamed_for_the_nodes_that_are_lost_with_it(address, nodes, tmp_path):
    """Whole machines are lost: Ray calls their nodes alive for many seconds more."""
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


def drain(address: str, machine: int, by: str) -> int:
    """Let Ray drain a node; return the pid of its raylet."""
    (raylet,) = [p for p in psutil.Process(machine).children() if p.name() == "raylet"]
    (node,) = [a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--node_id=")]
    command = [sys.executable, "-c", ENTRY, "drain-node", f"--address={address}"]
    command += [f"--node-id={node}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message=spot", "--deadline-remaining-seconds=60"]
    if by == "SIGTERM":
        os.kill(machine, signal.SIGTERM)
    else:
        subprocess.run(command, check=True, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    return raylet.pid


def test_nodes_that_drain_are_left_before_they_end(address, nodes, tmp_path):
    """Nothing is computed twice, and the nodes are idle at last, so Ray ends them."""
    write_source(tmp_path / "src" / "a", {"id": range(ROWS)}, row_group_size=20)
    kwargs = {"sleep": 0.2}
    stage = {"batch_size": 5, "resources": {"extra": 1}, "fn_constructor_kwargs": kwargs}
    with node(address):
        run, raylets = Process(tmp_path, {"one": stage}, "a", address=address), []
        for by in ("drain-node", "SIGTERM"):
            until(lambda: len(noted(tmp_path / "loads")) > len(raylets), "another worker", 90)
            least = 50 + len(noted(tmp_path / "calls"))
            until(lambda n=least: len(noted(tmp_path / "calls")) >= n, "it computes", 90)
            raylets.append(drain(address, os.getsid(noted(tmp_path / "loads")[-1]), by))
        until(lambda: not any(map(alive, raylets)), "the nodes end", 60)
        run.done()
    assert sorted(noted(tmp_path / "calls")) == list(range(ROWS))
    assert len(noted(tmp_path / "loads")) == 3
    assert run.output.count("is on a draining node") == 2
    assert "was lost" not in run.output


def test_nodes_killed_at_random_during_a_backfill_cost_a_slice_of_each_worker(
    address, nodes, tmp_path
):
    """They are lost with the tables that the next stage reads, too.

    A slice is at most a fragment, of 20 rows. Dagster retries nothing.
    """
    random, keys, rows = Random(5), "abc", 200
    ids = {key: range(number * rows, (number + 1) * rows) for number, key in enumerate(keys)}
    for key in keys:
        write_source(tmp_path / "src" / key, {"id": ids[key]}, row_group_size=20)
    one = {"batch_size": 5, "resources": {"extra": 1}, "concurrency": [1, 2], "columns": None}
    one["fn_constructor_kwargs"] = {"sleep": 0.1}
    (tmp_path / "two").mkdir()
    two = {"columns": None, "fn_constructor_kwargs": {"log": str(tmp_path / "two"), "sleep": 0.05}}
    with node(address) as third, node(address) as fourth:
        left = [*nodes, third, fourth]
        options = {"address": address, "pipeline": {"fragment_rows": 20}}
        run = Process(tmp_path, {"one": one, "two": two}, keys, **options)
        for computed in (100, 250, 400):
            until(lambda n=computed: len(noted(tmp_path / "calls")) >= n, "it computes", 120)
            lost = left.pop(random.randrange(len(left)))
            os.killpg(lost.pid, signal.SIGKILL)
        run.done()
    for key in keys:
        for stage in ("one", "two"):
            found = read_stage(tmp_path / "store", "docs", stage, key)
            assert sorted(found["id"].to_pylist()) == list(ids[key])
    assert len(noted(tmp_path / "calls")) <= 3 * rows + 3 * 20
    assert "was lost" in run.output
