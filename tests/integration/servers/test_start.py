"""The start of a server: its ports, key and files, and the errors of one that does not start."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.server_processes import ask, guarded, launch, port, running
from vane_dagster.errors import ModelLoadError
from vane_dagster.retries import Backoff, Restarts
from vane_dagster.servers.launch import Launch


def failing(code: str, *arguments: str, **fields) -> Launch:
    """A server that runs some Python code and ends."""
    return Launch("llm", (sys.executable, "-c", code, *arguments), **fields)


ONE_START = Restarts(max_failed_starts=1)


def error(launch: Launch, **limits) -> str:
    with pytest.raises(ModelLoadError) as caught, running(launch, **limits):
        pass
    return str(caught.value)


def test_a_server_is_ready_when_it_was_constructed_and_needs_its_key():
    """It listens on the given address alone; its key is on no command line."""
    made = launch("--warm-up-seconds", 0.3, ports=("port", "grpc_port"))
    with running(made, "127.0.0.2") as server:
        status, endpoint = server.status(), server.status().endpoint
        assert [ask(endpoint, "a", key=key)[0] for key in ("guessed", "", None)] == [401, 401, 200]
        assert (endpoint.model, endpoint.node) == ("echo", socket.gethostname())
        process = psutil.Process(status.pid)
        assert process.cmdline()[0] == sys.executable
        server.check_health()

        listening = {one.laddr for one in process.net_connections("tcp") if one.status == "LISTEN"}
        assert listening == {("127.0.0.2", port(endpoint))}
        assert endpoint.url == f"http://127.0.0.2:{port(endpoint)}"
        assert endpoint.grpc_url.startswith("grpc://127.0.0.2:")
        assert endpoint.grpc_url.rpartition(":")[2] != str(port(endpoint))

        lines = [psutil.Process(pid).cmdline() for pid in guarded(os.getpid())]
        assert len(lines) == 2
        assert not [line for line in lines if endpoint.api_key in " ".join(line)]
        assert endpoint.api_key not in repr(server.status())


def test_the_payload_is_private_and_is_removed_with_the_server():
    made = launch(payload=b"some function", env={"FUNCTION": "at {payload}"})
    with running(made) as server:
        variables = psutil.Process(server.status().pid).environ()
        assert variables["PYTHONUNBUFFERED"] == "1"
        path = Path(variables["FUNCTION"].removeprefix("at "))
        assert path.read_bytes() == b"some function"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


def test_three_exits_at_start_fail_fast_with_the_log(tmp_path):
    starts = tmp_path / "starts"
    began = time.monotonic()
    text = error(launch("--starts", starts, "--crash-at-start", 9, startup_timeout_s=600.0))
    assert time.monotonic() - began < 20
    assert len(starts.read_text().splitlines()) == 3
    assert "Server 'echo' did not start: 3 starts in a row failed" in text
    assert "exited with code 3" in text
    assert "cannot load the model at start 3" in text
    assert "cannot load the model at start 2" not in text, "of the last start alone"
    (command,) = [line for line in text.splitlines() if line.startswith("Command: ")]
    assert command.startswith(f"Command: {sys.executable}")
    assert "{" not in command, "ports and the address are those of the last start"


def test_a_start_is_tried_again_on_other_ports(tmp_path):
    starts = tmp_path / "starts"
    with running(launch("--starts", starts, "--crash-at-start", 2)) as server:
        lines = server.log(1000).splitlines()
        ports = [line.rpartition(" ")[2] for line in lines if "on port" in line]
        assert len(set(ports)) == 3
        assert ports[-1] == str(port(server.status().endpoint))
        assert server.status().restarts == 0


def test_secrets_are_masked_in_the_error_and_the_log():
    code = "import os; print('the key is', os.environ['KEY'], os.environ['HF_TOKEN']); exit(3)"
    made = failing(
        code, "--api-key", "of-the-flag", key_env="KEY", env={"HF_TOKEN": "of-the-variable"}
    )
    text = error(made, restarts=ONE_START)
    assert "the key is *** ***" in text
    assert "of-the-flag" not in text
    assert "--api-key '***'" in text or "--api-key ***" in text


def test_a_command_that_does_not_exist_is_tried_once():
    text = error(Launch("llm", ("no-such-command",)), restarts=Restarts(Backoff(60.0, 60.0)))
    assert "could not be started: FileNotFoundError" in text


@pytest.mark.parametrize(
    ("flag", "answered"),
    [
        ("--warm-up-seconds", "GET /health: status 503"),
        ("--start-seconds", "GET /health: ConnectionRefusedError"),
    ],
)
def test_a_server_that_is_not_ready_in_time_fails_and_leaves_nothing(flag, answered, tmp_path):
    children, began = tmp_path / "children", time.monotonic()
    leaks = ("--leak-children", 2, "--children", children)
    text = error(launch(*leaks, flag, 100, startup_timeout_s=2.0))
    assert time.monotonic() - began < 10
    assert f"was not ready within 2 s (startup_timeout_s): {answered}" in text
    pids = {int(line) for line in children.read_text().splitlines()}
    assert len(pids) == 2
    assert not pids & {process.pid for process in psutil.process_iter()}
    assert not guarded(os.getpid())
