"""Supervision of a server over a guard that does what the test says: starts, restarts, limits."""

from __future__ import annotations

import dataclasses
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server_processes import FAST, port, until
from vane_dagster.errors import ModelLoadError
from vane_dagster.retries import Backoff, Restarts
from vane_dagster.servers import process
from vane_dagster.servers.guard import ending
from vane_dagster.servers.launch import Launch, ServerStatus
from vane_dagster.servers.process import ServerProcess

COMMAND = ("serve", "{port}", "--host", "{host}", "--api-key", "of-the-flag")
QUICK = dataclasses.replace(
    FAST, restarts=Restarts(Backoff(0.01, 0.01)), start_interval_s=0.001, check_interval_s=0.001
)


class Guard:
    def __init__(self, command: list[str], env: dict[str, str], **given: Any) -> None:
        self.command, self.env, self.log = command, env, given["log"]
        self.pid = self.guard_pid = None
        self.ended = threading.Event()
        self.error = self.outcome = ""
        self.drains: list[float] = []

    def end(self, drain_s: float) -> None:
        self.drains.append(drain_s)
        self.ended.set()

    def crash(self, code: int = 3) -> None:
        self.outcome = ending(code)
        self.ended.set()


class World:
    """The guards of a server's starts, and what the server answers to health checks."""

    def __init__(self) -> None:
        self.guards: list[Any] = []
        self.start: Callable[[Any], None] = lambda guard: None
        self.problem = ""

    def guard(self, *args: Any, **given: Any) -> Guard:
        self.guards.append(Guard(*args, **given))
        self.start(self.guards[-1])
        return self.guards[-1]

    @property
    def ports(self) -> list[str]:
        return [guard.command[1] for guard in self.guards]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(process, "connected_ray", lambda: None)
    monkeypatch.setattr(process, "GuardedServer", made.guard)
    monkeypatch.setattr(process, "health_problem", lambda endpoint, timeout: made.problem)
    yield made
    assert all(guard.ended.is_set() for guard in made.guards)


def serve(restarts: Restarts = QUICK.restarts, **fields: Any) -> ServerProcess:
    launch = Launch("llm", COMMAND, **{"startup_timeout_s": 5.0, **fields})
    return ServerProcess(launch, "127.0.0.1", dataclasses.replace(QUICK, restarts=restarts))


def refusal(**given: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        serve(**given)
    return str(caught.value)


def ready(server: ServerProcess, restarts: int) -> ServerStatus:
    return until(
        lambda: (s := server.status()).state == "ready" and s.restarts == restarts and s, 5.0
    )


def test_a_start_is_tried_again_on_other_ports_and_fails_with_the_last_log(world):
    """Secrets are masked, in the log and in the command."""

    def crash(guard: Guard) -> None:
        start = len(world.guards)
        guard.log(f"start {start}: {guard.env['KEY']} {guard.env['HF_TOKEN']}\n".encode())
        guard.crash()

    world.start = crash
    text = refusal(key_env="KEY", env={"HF_TOKEN": "of-the-variable"})
    assert len(set(world.ports)) == 3
    assert text.startswith("Server 'llm' did not start: 3 starts in a row failed; the last time it")
    assert "exited with code 3 0.0 s after its start" in text
    assert "start 3: *** ***" in text
    assert "start 2" not in text
    last = f"serve {world.ports[-1]} --host 127.0.0.1 --api-key"
    assert text.splitlines()[-1] in (f"Command: {last} '***'", f"Command: {last} ***")


def test_starts_that_another_would_not_mend_are_not_tried_again(world):
    def missing(guard: Guard) -> None:
        guard.error = "could not be started: FileNotFoundError"
        guard.ended.set()

    world.start = missing
    assert "did not start: could not be started: FileNotFoundError" in refusal()
    world.start, world.problem = (lambda guard: None), "status 503"
    slow = "was not ready within 0.01 s (startup_timeout_s): GET /health: status 503"
    assert slow in refusal(startup_timeout_s=0.01)
    assert [guard.drains[0] for guard in world.guards] == [0.0, 0.0]


def test_while_it_is_restarted_it_keeps_its_address_and_has_another_if_its_port_is_taken(world):
    server = serve(Restarts(Backoff(0.05, 0.05)))
    before = server.status().endpoint
    for is_taken in (False, True):
        world.guards[-1].crash(-9)
        status = server.status()
        assert (status.state, status.endpoint) == ("restarting", before)
        assert status.endpoint.life == (int(is_taken), True)
        server.check_health()
        with socket.socket() as other:
            if is_taken:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port(before)))
                other.listen()
            status = ready(server, 1 + is_taken)
        assert (status.endpoint != before) is is_taken
        assert "was killed by SIGKILL" in status.reason
    server.stop()


def test_a_server_that_hangs_is_killed(world):
    server = serve(liveness_timeout_s=0.01, drain_timeout_s=7.0)

    def heal(guard: Guard) -> None:
        world.problem = ""

    world.start = heal
    for restarts in (1, 2):
        world.problem = "TimeoutError"
        reason = "was not healthy for 0 s: GET /health: TimeoutError"
        assert reason in ready(server, restarts).reason
        assert world.guards[-2].drains == [0.0]
    server.stop()


def test_the_last_crash_is_final_and_says_so_and_a_stopped_server_says_so_too(world):
    server = serve(Restarts(QUICK.restarts.backoff, max_crashes=2))
    for restarts in range(2):
        world.guards[-1].log(b"the server ends\n")
        ready(server, restarts)
        world.guards[-1].crash(-9)
    status = until(lambda: (found := server.status()).state == "failed" and found)
    assert status.reason.startswith("2 crashes without 10 minutes of uptime between them")
    assert "was killed by SIGKILL" in status.reason
    assert status.endpoint is None
    with pytest.raises(RuntimeError, match="'llm' failed: 2 crashes"):
        server.check_health()
    assert "the server ends" in server.log(100)
    server.stop()

    server = serve(drain_timeout_s=7.0)
    for _ in range(2):
        server.stop()
    assert world.guards[-1].drains[0] == 7.0
    assert not Path(server.status().log_path).exists()
    assert (server.status().state, server.status().endpoint) == ("stopped", None)
    with pytest.raises(RuntimeError, match="'llm' stopped"):
        server.check_health()
