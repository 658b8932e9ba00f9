"""Server processes for tests: their declarations, requests to them, and what is left of them.

Run as a script, it is a worker process with a server: it prints the server's status as JSON when
the server is ready, and sleeps.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from vane_dagster.retries import Backoff, Restarts
from vane_dagster.servers import guard
from vane_dagster.servers.launch import Endpoint, Launch, ServerStatus
from vane_dagster.servers.process import ServerProcess, SupervisionLimits

SERVER = str(Path(__file__).with_name("misbehaving_server.py"))
FAST = SupervisionLimits(
    restarts=Restarts(Backoff(0.05, 0.2)),
    start_interval_s=0.05,
    check_interval_s=0.1,
    probe_timeout_s=0.3,
)


def launch(*flags: object, **fields: Any) -> Launch:
    """The launch of a misbehaving server, with a key."""
    own = ("--port", "{port}", "--host", "{host}", "--key-env", "SERVER_KEY")
    made = {
        "label": "echo",
        "command": (sys.executable, SERVER, *own, *map(str, flags)),
        "key_env": "SERVER_KEY",
        "model": "echo",
        "startup_timeout_s": 60.0,
        "liveness_timeout_s": 0.5,
        "drain_timeout_s": 20.0,
    }
    return Launch(**{**made, **fields})


def guard_of(server: ServerProcess) -> psutil.Process:
    """Return the guard of a server that runs."""
    found = psutil.Process(server.status().pid).parent()
    assert found is not None
    return found


def processes(server: ServerProcess) -> set[int]:
    """Return the processes of a server; none if it does not run."""
    if server.status().pid is None:
        return set()
    return {one.pid for one in guard_of(server).children(recursive=True)}


@contextlib.contextmanager
def running(launch: Launch, host: str = "", **limits: Any) -> Iterator[ServerProcess]:
    """Yield a server that is stopped at the end; at which nothing may be left of it."""
    server = ServerProcess(launch, host, dataclasses.replace(FAST, **limits))
    pids: set[int] = set()
    try:
        yield server
        pids = processes(server)
    finally:
        server.stop()
    until(lambda: not left(pids))


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)
    return found


def ready(server: ServerProcess, restarts: int) -> ServerStatus:
    def found() -> ServerStatus | None:
        status = server.status()
        assert status.state != "failed", status.reason
        return status if status.state == "ready" and status.restarts == restarts else None

    return until(found)


def ask(endpoint: Endpoint, prompt: str, key: str | None = None) -> tuple[int, Any]:
    message = {"model": "echo", "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"{endpoint.url}/v1/chat/completions",
        json.dumps(message).encode(),
        {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def answer(endpoint: Endpoint, prompt: str) -> str:
    status, body = ask(endpoint, prompt)
    assert status == 200
    return str(body["choices"][0]["message"]["content"])


def in_flight(endpoint: Endpoint) -> int:
    with urllib.request.urlopen(f"{endpoint.url}/metrics", timeout=10) as found:
        return int(float(found.read().split()[-1]))


def port(endpoint: Endpoint | dict[str, Any]) -> int:
    url = endpoint["url"] if isinstance(endpoint, dict) else endpoint.url
    return int(url.rpartition(":")[2])


def is_free(number: int, host: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, number))
        except OSError:
            return False
    return True


def tree(pid: int) -> set[int]:
    """The descendants of a process that are alive."""
    return left({one.pid for one in psutil.Process(pid).children(recursive=True)})


def is_guard(words: list[str]) -> bool:
    """Whether a command line is that of the guard of a server."""
    return f"from {guard.__name__} import" in " ".join(words[3:4])


def guarded(worker: int) -> set[int]:
    """The guards of a worker's servers, and the processes below them."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if is_guard(words := process.cmdline()) and words[4] == str(worker):
                found |= {process.pid} | tree(process.pid)
    return left(found)


def left(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


class Worker:
    """A worker process with a server, and the processes below it."""

    def __init__(self, launch: Launch, prelude: str = "") -> None:
        given = base64.b64encode(pickle.dumps((launch, FAST))).decode()
        self.process = subprocess.Popen(
            [sys.executable, __file__, given, prelude],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self.pids: set[int] = set()
        self.status: dict[str, Any] = {}

    def wait(self) -> Worker:
        assert self.process.stdout is not None
        self.status = json.loads(self.process.stdout.readline())
        self.pids = self.descendants()
        return self

    def descendants(self) -> set[int]:
        """The processes of the worker's servers, their guards too, and those that it has forked."""
        return tree(self.process.pid) | guarded(self.process.pid)

    def close(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _main() -> None:
    made, limits = pickle.loads(base64.b64decode(sys.argv[1]))
    exec(sys.argv[2])
    server = ServerProcess(made, "", limits)
    print(json.dumps(dataclasses.asdict(server.status())), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    _main()
