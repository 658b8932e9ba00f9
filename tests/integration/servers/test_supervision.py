"""Supervision of a server that is ready: restarts, limits, load, its log and its end."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.server_processes import (
    FAST,
    answer,
    ask,
    in_flight,
    is_free,
    launch,
    left,
    port,
    ready,
    running,
    until,
)
from vane_dagster.retries import Backoff, Restarts
from vane_dagster.servers import process
from vane_dagster.servers.launch import Launch
from vane_dagster.servers.process import ServerProcess


@pytest.fixture(autouse=True)
def logs_of_their_own(monkeypatch):
    """Logs are not in Ray's folder, where earlier tests have connected this process to Ray."""
    monkeypatch.setattr(process, "_ray_logs", str)


def start(launch: Launch) -> ServerProcess:
    return ServerProcess(launch, limits=FAST)


def interrupted(endpoint, prompt: str) -> None:
    """Send a prompt to a server that does not answer it."""
    with pytest.raises(OSError):  # noqa: PT011 (a reset, or the end of the stream)
        ask(endpoint, prompt)


def test_while_it_is_restarted_it_has_no_endpoint_and_then_another_if_its_port_is_taken():
    with (
        running(launch(), restarts=Restarts(Backoff(0.2, 0.2))) as server,
        socket.socket() as other,
    ):
        before = server.status().endpoint
        os.kill(server.status().pid, signal.SIGKILL)
        until(lambda: server.status().state == "restarting")
        assert (server.status().endpoint, server.status().pid) == (None, None)
        server.check_health()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port(before)))
        other.listen()
        after = ready(server, restarts=1).endpoint
        assert port(after) != port(before)
        assert answer(after, "a") == "echo: a"


def test_a_server_that_hangs_is_restarted_though_it_ignores_sigterm():
    with running(launch()) as server:
        before = server.status()
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(interrupted, before.endpoint, "a hang")
            until(lambda: server.status().state == "restarting")
            status = ready(server, restarts=1)
            asked.result()
        assert "was not healthy for" in status.reason
        assert "GET /health: TimeoutError" in status.reason
        assert status.endpoint == before.endpoint
        assert not left({before.pid})


def test_a_server_that_leaks_is_drained_and_restarted_which_is_no_crash():
    # One crash would be the last: a limit of 1.
    made = launch("--leak-mb", 500, "--seconds", 0.5, max_rss=400 * 2**20, liveness_timeout_s=60.0)
    with running(made, restarts=Restarts(Backoff(0.05, 0.2), max_crashes=1)) as server:
        endpoint = server.status().endpoint
        for restarts in (1, 2):
            assert answer(endpoint, str(restarts)) == f"echo: {restarts}"
            status = ready(server, restarts)
            assert "max_rss=400 MiB" in status.reason


def test_the_third_crash_is_the_last_with_a_limit_of_three():
    server = ServerProcess(
        launch(), limits=replace(FAST, restarts=Restarts(Backoff(0.05, 0.2), max_crashes=3))
    )
    try:
        for restarts in range(3):
            server.check_health()
            os.kill(ready(server, restarts).pid, signal.SIGKILL)
        status = until(lambda: server.status() if server.status().state == "failed" else None)
        assert status.reason.startswith("3 crashes without 10 minutes of uptime between them")
        assert "was killed by SIGKILL" in status.reason
        assert status.endpoint is None
        with pytest.raises(RuntimeError, match="'echo' failed: 3 crashes"):
            server.check_health()
        assert "the server starts" in server.log(100)
    finally:
        server.stop()


def test_a_killed_server_is_restarted_on_its_port_with_its_key_and_leaves_nothing(tmp_path):
    """Python's resource tracker removes shared memory, if it lives longer than the server."""
    file, blocks = tmp_path / "children", tmp_path / "blocks"
    flags = ("--leak-children", 3, "--children", file, "--shared-memory", blocks)
    with running(launch(*flags)) as server:
        (block,) = blocks.read_text().split()
        assert Path("/dev/shm", block).exists()
        first = {int(line) for line in file.read_text().split()}
        assert len(left(first)) == 3
        before = server.status()
        os.kill(before.pid, signal.SIGKILL)
        after = ready(server, restarts=1)
        assert (after.endpoint, after.pid != before.pid) == (before.endpoint, True)
        assert answer(before.endpoint, "a") == "echo: a"
        assert "was killed by SIGKILL" in after.reason
        assert after.uptime_seconds < 5
        assert not left(first)
        assert not Path("/dev/shm", block).exists()
        second = {int(line) for line in file.read_text().split()} - first
        assert len(left(second)) == 3
    assert not left(second)
    assert not any(Path("/dev/shm", block).exists() for block in blocks.read_text().split())


def test_a_stop_waits_for_requests_in_flight():
    """Each takes longer than `liveness_timeout_s`, which is not the server's death."""
    # The server does not answer health checks meanwhile.
    server = start(launch("--seconds", 1, liveness_timeout_s=0.2))
    endpoint = server.status().endpoint
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(answer, endpoint, str(i)) for i in range(4)]
        until(lambda: in_flight(endpoint) == 4)
        server.stop()
        assert [one.result() for one in found] == [f"echo: {i}" for i in range(4)]
    assert server.status().restarts == 0
    assert is_free(port(endpoint))


def test_after_a_stop_nothing_is_left_though_it_ignores_sigterm():
    server = start(launch("--leak-children", 2, "--ignore-sigterm", drain_timeout_s=0.5))
    status = server.status()
    pids = {one.pid for one in server._processes()} | {server._guard.guard_pid}
    assert len(left(pids)) == 4
    began = time.monotonic()
    server.stop()
    assert 0.5 <= time.monotonic() - began < 5
    until(lambda: not left(pids))
    assert is_free(port(status.endpoint))
    assert not Path(status.log_path).exists()
    stopped = server.status()
    assert (stopped.state, stopped.endpoint, stopped.pid) == ("stopped", None, None)
    with pytest.raises(RuntimeError, match="'echo' stopped"):
        server.check_health()
    server.stop()


def test_the_servers_own_signals_are_not_those_of_the_worker():
    """A worker ignores SIGINT, and an ignored signal is inherited."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = start(launch())
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        status = Path(f"/proc/{server.status().pid}/status").read_text()
        fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
        assert not int(fields["SigIgn"], 16) & (1 << signal.SIGINT - 1)
        assert int(fields["SigBlk"], 16) == 0
        assert psutil.Process(server.status().pid).ppid() == server._guard.guard_pid
    finally:
        server.stop()
