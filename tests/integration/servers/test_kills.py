"""No process of a server outlives its worker, whichever process is killed."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from support.server_processes import (
    FAST,
    Worker,
    answer,
    is_free,
    launch,
    left,
    port,
    ready,
    running,
    until,
)
from vane_dagster.servers import guard
from vane_dagster.servers.process import ServerProcess


def worker(tmp_path: Path, prelude: str = "") -> Worker:
    """A worker whose server has child processes in sessions of their own."""
    made = launch("--leak-children", 2, "--children", tmp_path / "children")
    found = Worker(made, prelude=prelude).wait()
    assert {int(line) for line in (tmp_path / "children").read_text().split()} < found.pids
    assert len(found.pids) == 5
    return found


def assert_nothing_is_left(worker: Worker) -> None:
    until(lambda: not left(worker.pids))
    assert is_free(port(worker.status["endpoint"]))
    folder = Path(worker.status["log_path"]).parent
    until(lambda: not folder.exists())


def test_a_killed_worker(tmp_path):
    one = worker(tmp_path)
    one.kill()
    assert_nothing_is_left(one)


def test_a_worker_killed_with_its_process_group(tmp_path):
    one = worker(tmp_path, "import os; os.setsid()")
    os.killpg(one.process.pid, signal.SIGKILL)
    one.close()
    assert_nothing_is_left(one)


@pytest.mark.parametrize("which", [0, 1], ids=["outer", "inner"])
def test_a_worker_killed_with_a_process_of_the_guard(tmp_path, which):
    """Ray kills the child processes of a worker that exits."""
    one = worker(tmp_path)
    os.kill(one.guards[which], signal.SIGKILL)
    one.kill()
    until(lambda: not left(one.pids))
    assert is_free(port(one.status["endpoint"]))


def test_a_worker_killed_after_it_has_forked(tmp_path):
    """The child process holds the pipe to the guard open."""
    prelude = (
        "import os, threading, time\n"
        "def fork():\n"
        "    time.sleep(1)\n"
        "    if os.fork() == 0:\n"
        "        os.setsid(); time.sleep(60); os._exit(0)\n"
        "threading.Thread(target=fork, daemon=True).start()"
    )
    one = worker(tmp_path, prelude)
    server = set(one.pids)
    until(lambda: one.descendants() - server)
    forked = one.descendants() - server
    one.kill()
    try:
        until(lambda: not left(server))
        assert left(forked), "else the pipe was not held"
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


def test_a_worker_killed_while_its_server_starts(tmp_path):
    children = tmp_path / "children"
    made = launch("--leak-children", 2, "--children", children, "--warm-up-seconds", 100)
    one = Worker(made)
    until(lambda: children.exists() and len(children.read_text().split()) == 2)
    one.pids = one.descendants()
    one.kill()
    until(lambda: not left(one.pids))


def test_an_interrupt_of_the_start_ends_the_server(tmp_path):
    children = tmp_path / "children"
    made = launch("--leak-children", 2, "--children", children, "--warm-up-seconds", 100)
    one = Worker(made)
    until(lambda: children.exists() and len(children.read_text().split()) == 2)
    one.pids = one.descendants()
    one.process.send_signal(signal.SIGINT)
    one.close()
    assert not left(one.pids)


@pytest.mark.parametrize("which", [0, 1], ids=["outer", "inner"])
def test_a_killed_guard(which, tmp_path):
    file = tmp_path / "children"
    with running(launch("--leak-children", 2, "--children", file)) as server:
        before = server.status()
        pids = {one.pid for one in server._processes()}
        assert len(pids) == 3
        os.kill(server._guard.guard_pids[which], signal.SIGKILL)
        after = ready(server, restarts=1)
        assert after.endpoint == before.endpoint
        assert not left(pids)
        assert answer(after.endpoint, "a") == "echo: a"


def test_both_processes_of_the_guard_killed_at_once():
    """Then child processes in the session of the server are still ended."""
    own = launch()
    made = launch(command=("sh", "-c", 'sleep 1000000 & exec "$@"', "sh", *own.command))
    with running(made) as server:
        pids = {one.pid for one in server._processes()}
        assert len(pids) == 2
        for pid in server._guard.guard_pids:
            os.kill(pid, signal.SIGKILL)
        ready(server, restarts=1)
        until(lambda: not left(pids))


def test_a_guard_that_is_stopped_is_killed(monkeypatch):
    monkeypatch.setattr(guard, "_KILL_SECONDS", 0.5)
    server = ServerProcess(launch("--leak-children", 2, drain_timeout_s=0.1), limits=FAST)
    pids = {one.pid for one in server._processes()} | {*server._guard.guard_pids}
    os.kill(server._guard.guard_pids[1], signal.SIGSTOP)
    server.stop()
    assert not left(pids)


def test_random_kills():
    """Of the server, its children and its guard's processes; at each restart all of it is new."""
    choice = random.Random(17)
    server = ServerProcess(launch("--leak-children", 2), limits=replace(FAST, max_crashes=100))
    try:
        first = server.status().endpoint
        for restarts in range(8):
            status = ready(server, restarts)
            pids = {one.pid for one in server._processes()} | {*server._guard.guard_pids}
            os.kill(choice.choice([status.pid, *server._guard.guard_pids]), signal.SIGKILL)
            ready(server, restarts + 1)
            assert not left(pids)
        assert server.status().endpoint == first
        assert answer(first, "a") == "echo: a"
    finally:
        server.stop()
    assert is_free(port(first))
