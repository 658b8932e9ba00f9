"""No process of a server outlives its worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.server_processes import (
    Worker,
    answer,
    is_free,
    launch,
    left,
    port,
    ready,
    running,
    tree,
    until,
)


def worker(tmp_path: Path, prelude: str = "") -> Worker:
    """A worker whose server has child processes in sessions of their own."""
    made = launch("--leak-children", 2, "--children", tmp_path / "children")
    found = Worker(made, prelude=prelude).wait()
    assert {int(line) for line in (tmp_path / "children").read_text().split()} < found.pids
    assert len(found.pids) == 4
    return found


def assert_nothing_is_left(worker: Worker) -> None:
    until(lambda: not left(worker.pids))
    assert is_free(port(worker.status["endpoint"]))
    folder = Path(worker.status["log_path"]).parent
    until(lambda: not folder.exists())


@pytest.mark.parametrize("group", [False, True])
def test_a_killed_worker(group, tmp_path):
    one = worker(tmp_path, "import os; os.setsid()" if group else "")
    assert not tree(one.process.pid), "Ray kills the child processes of a worker that it ends"
    if group:
        os.killpg(one.process.pid, signal.SIGKILL)
    else:
        one.process.kill()
    one.close()
    assert_nothing_is_left(one)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_ended_while_its_server_starts(number, tmp_path):
    children = tmp_path / "children"
    made = launch("--leak-children", 2, "--children", children, "--warm-up-seconds", 100)
    one = Worker(made)
    until(lambda: children.exists() and len(children.read_text().split()) == 2)
    one.pids = one.descendants()
    one.process.send_signal(number)
    one.close()
    until(lambda: not left(one.pids))


def test_a_killed_guard():
    own = launch().command
    with running(launch(command=("sh", "-c", 'sleep 1000 & "$@"', "sh", *own))) as server:
        before = server.status()
        pids = {one.pid for one in server._processes()}
        assert len(pids) == 3
        os.kill(server._guard.guard_pid, signal.SIGKILL)
        after = ready(server, restarts=1)
        assert after.endpoint == before.endpoint
        until(lambda: not left(pids))
        assert answer(after.endpoint, "a") == "echo: a"
