"""Ray heads for single tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from vane_dagster.compute.local_head import RAY_START, Head

HEAD = Head(
    address="127.0.0.1:1",
    pid=1,
    session_dir="/nowhere",
    token_path="/nowhere/token",
    started_at=0.0,
    prefix="/env/a",
    settings=(),
    name="default",
)
"""The record of a head that does not exist."""


@contextlib.contextmanager
def accepting() -> Iterator[Head]:
    """The record of a head whose sockets this process holds."""
    with (
        tempfile.TemporaryDirectory() as session,
        socket.create_server(("127.0.0.1", 0)) as gcs,
        socket.socket(socket.AF_UNIX) as raylet,
    ):
        os.mkdir(f"{session}/sockets")
        raylet.bind(f"{session}/sockets/raylet")
        raylet.listen()
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        yield replace(HEAD, address=address, session_dir=session)


ENTRY = f"{RAY_START}scripts.main()"
START = (sys.executable, "-c", ENTRY, "start", "--block", "--disable-usage-stats")
START += ("--node-ip-address=127.0.0.1", "--include-log-monitor=false")
"""The command of a head or a node, without the processes that no test needs."""


@dataclass(frozen=True)
class Cluster:
    """A Ray head of a single test, which requires no token."""

    address: str
    client: str
    python_path: Path


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@contextlib.contextmanager
def head(*options: str, grows: bool = False, **variables: str) -> Iterator[Cluster]:
    """Start a head with 2 CPUs and 1 (logical) GPU, and end all of its processes afterwards.

    Only one that `grows` has an autoscaler.
    """
    options = (*options, *([] if grows else ["--no-monitor"]))
    # In /tmp, because paths of sockets are limited.
    with (
        tempfile.TemporaryDirectory(prefix="vh-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        _started(Path(folder), options, variables) as cluster,
    ):
        yield cluster


@contextlib.contextmanager
def _started(
    folder: Path, options: Sequence[str], variables: Mapping[str, str]
) -> Iterator[Cluster]:
    client, python_path = free_port(), folder / "python"
    python_path.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONPATH"))}
    command = [*START, "--head", "--num-cpus=2", "--num-gpus=1", "--port=0"]
    command += ["--include-dashboard=false", f"--ray-client-server-port={client}"]
    command += [f"--temp-dir={folder}", "--object-store-memory=200000000", *options]
    environment["RAY_prestart_worker_first_driver"] = "0"
    # Without the last, Ray's client server loses one connection in four: ray-project/ray#63202.
    environment |= {"RAY_AUTH_MODE": "disabled", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    started = subprocess.Popen(
        command,
        env={**environment, "PYTHONPATH": str(python_path), **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Cluster(_address(folder, client, started), f"ray://127.0.0.1:{client}", python_path)
    finally:
        processes = [psutil.Process(started.pid)]
        processes += processes[0].children(recursive=True)
        for process in reversed(processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, 10)
        started.wait()


def _address(folder: Path, client: int, started: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 60
    current = folder / "ray_current_cluster"
    while True:
        assert started.poll() is None, "ray start ended"
        assert time.monotonic() < deadline, "ray start is not ready"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", client), 1).close()
            if address := current.read_text().strip():
                return address
        time.sleep(0.2)
