"""The processes of a server: its key and files, its restarts, and that nothing is left of it.

What supervision decides is in tests/unit/servers/test_supervision.py.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.server_processes import (
    FAST,
    Worker,
    answer,
    ask,
    guard_of,
    guarded,
    in_flight,
    is_free,
    launch,
    left,
    port,
    processes,
    ready,
    running,
    tree,
    until,
)
from vane_dagster.errors import ModelLoadError
from vane_dagster.servers import process
from vane_dagster.servers.launch import Launch
from vane_dagster.servers.process import ServerProcess


@pytest.fixture(autouse=True)
def logs_of_their_own(monkeypatch):
    """Logs are not in Ray's folder, where earlier tests have connected this process to Ray."""
    monkeypatch.setattr(process, "_ray_logs", str)


def interrupted(endpoint, prompt: str) -> None:
    """Send a prompt to a server that does not answer it."""
    with pytest.raises(OSError):  # noqa: PT011 (a reset, or the end of the stream)
        ask(endpoint, prompt)


def numbers(file: Path) -> set[int]:
    return {int(line) for line in file.read_text().split()}


def test_a_server_from_its_start_to_its_end(tmp_path):
    file, blocks = tmp_path / "children", tmp_path / "blocks"
    flags = ("--leak-children", 2, "--children", file, "--shared-memory", blocks)
    made = launch(
        *flags, "--warm-up-seconds", 0.3, "--seconds", 0.6, ports=("port", "grpc_port"),
        payload=b"some function", env={"FUNCTION": "at {payload}"},
    )  # fmt: skip
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers ignore it, which is inherited
    try:
        server = ServerProcess(made, "127.0.0.2", FAST)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        # It is ready, and listens on the given address alone, with other ports for gRPC.
        status, endpoint = server.status(), server.status().endpoint
        own = psutil.Process(status.pid)
        listening = {one.laddr for one in own.net_connections("tcp") if one.status == "LISTEN"}
        assert listening == {("127.0.0.2", port(endpoint))}
        assert endpoint.grpc_url.startswith("grpc://127.0.0.2:")
        assert endpoint.grpc_url.rpartition(":")[2] != str(port(endpoint))
        assert (endpoint.model, endpoint.node) == ("echo", socket.gethostname())

        # It needs its key, which is on no command line.
        assert [ask(endpoint, "a", key=key)[0] for key in ("guessed", "", None)] == [401, 401, 200]
        lines = [" ".join(psutil.Process(pid).cmdline()) for pid in guarded(os.getpid())]
        assert len(lines) >= 4
        assert not [line for line in lines if endpoint.api_key in line]
        assert endpoint.api_key not in repr(status)

        # Its payload is private, and its signals are not those of the worker.
        assert own.cmdline()[0] == sys.executable
        assert own.environ()["PYTHONUNBUFFERED"] == "1"
        payload = Path(own.environ()["FUNCTION"].removeprefix("at "))
        assert payload.read_bytes() == b"some function"
        assert stat.S_IMODE(payload.stat().st_mode) == 0o600
        assert stat.S_IMODE(payload.parent.stat().st_mode) == 0o700
        fields = Path(f"/proc/{status.pid}/status").read_text()
        kept = dict(line.split(":\t") for line in fields.splitlines() if ":\t" in line)
        assert not int(kept["SigIgn"], 16) & (1 << signal.SIGINT - 1)
        assert int(kept["SigBlk"], 16) == 0

        # After a kill and a hang it is on its port with its key. Python's resource tracker removes
        # shared memory, if it lives longer than the server.
        for restarts, reason in ((1, "was killed by SIGKILL"), (2, "GET /health: TimeoutError")):
            children = numbers(file)
            with ThreadPoolExecutor(1) as thread:
                if restarts == 1:
                    os.kill(server.status().pid, signal.SIGKILL)
                else:
                    asked = thread.submit(interrupted, endpoint, "a hang")
                after = ready(server, restarts)
            assert restarts == 1 or asked.result() is None
            assert (after.endpoint, reason in after.reason) == (endpoint, True)
            assert answer(endpoint, "a") == "echo: a"
            assert not left(children | {status.pid})
            assert len(left(numbers(file))) == 2
            *gone, block = blocks.read_text().split()
            assert not any(Path("/dev/shm", each).exists() for each in gone)
            assert Path("/dev/shm", block).exists()

        # Its end waits for the requests in flight; after it, nothing is left.
        pids = processes(server) | {guard_of(server).pid}
        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(answer, endpoint, str(i)) for i in range(4)]
            until(lambda: in_flight(endpoint) == 4)
            server.stop()
            assert [one.result() for one in found] == [f"echo: {i}" for i in range(4)]
    finally:
        server.stop()
    until(lambda: not left(pids | numbers(file)))
    assert is_free(port(endpoint), "127.0.0.2")
    assert not any(Path("/dev/shm", each).exists() for each in blocks.read_text().split())
    assert not payload.parent.exists()
    assert not Path(status.log_path).exists()


def test_a_start_that_fails_and_an_end_without_sigterm_leave_nothing(tmp_path):
    file = tmp_path / "children"
    leaks = ("--leak-children", 2, "--children", file)
    slow = launch(*leaks, "--warm-up-seconds", 100, startup_timeout_s=2.0)
    for made, reason in (
        (Launch("llm", ("no-such-command",)), "could not be started: FileNotFoundError"),
        (slow, "was not ready within 2 s (startup_timeout_s): GET /health: status 503"),
    ):
        with pytest.raises(ModelLoadError) as caught, running(made):
            pass
        assert reason in str(caught.value)
        assert not guarded(os.getpid())
    assert len(numbers(file)) == 2
    assert not left(numbers(file))

    server = ServerProcess(launch(*leaks, "--ignore-sigterm", drain_timeout_s=0.5), limits=FAST)
    pids = processes(server) | {guard_of(server).pid}
    assert len(left(pids)) == 4
    began = time.monotonic()
    server.stop()
    assert 0.5 <= time.monotonic() - began < 5
    until(lambda: not left(pids))


def test_no_process_outlives_its_worker_or_its_guard(tmp_path):
    file = tmp_path / "children"
    leaks = ("--leak-children", 2, "--children", file)
    # A worker is killed with its group, which its server is not in, or while its server starts.
    for number, flags in (
        (signal.SIGKILL, ()),
        (signal.SIGINT, ("--warm-up-seconds", 100)),
    ):
        file.unlink(missing_ok=True)
        one = Worker(launch(*leaks, *flags), prelude="import os; os.setsid()")
        if flags:
            until(lambda: file.exists() and len(numbers(file)) == 2)
            one.pids = one.descendants()
        else:
            one.wait()
        assert numbers(file) < one.pids
        assert not tree(one.process.pid), "Ray kills the child processes of a worker that it ends"
        os.killpg(one.process.pid, number)
        one.close()
        until(lambda pids=one.pids: not left(pids))
        if not flags:
            assert is_free(port(one.status["endpoint"]))
            until(lambda path=Path(one.status["log_path"]): not path.parent.exists())

    # A guard is killed: its server ends, and another one has its endpoint.
    own = launch().command
    made = replace(launch(), command=("sh", "-c", 'sleep 1000 & "$@"', "sh", *own))
    with running(made) as server:
        before = server.status()
        pids = processes(server)
        assert len(pids) == 3
        guard_of(server).kill()
        after = ready(server, restarts=1)
        assert after.endpoint == before.endpoint
        until(lambda: not left(pids))
        assert answer(after.endpoint, "a") == "echo: a"
