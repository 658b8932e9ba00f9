"""One replica of a server in a worker process: start, supervision, restart, end."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

from vane_dagster._private_folder import new_temporary_folder, worker_folder
from vane_dagster._secrets import keep_arguments, keep_variables, masked
from vane_dagster.errors import ModelLoadError, described
from vane_dagster.retries import Restarts
from vane_dagster.servers import triton_runner
from vane_dagster.servers.guard import GuardedServer
from vane_dagster.servers.launch import (
    Endpoint,
    Launch,
    ServerState,
    ServerStatus,
    connected_ray,
    flags,
    health_problem,
    own_node_id,
)
from vane_dagster.servers.server_log import ServerLog

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _StartError(Exception):
    """The server did not become ready."""


class _HopelessError(Exception):
    """Another start of the server would fail too."""


@dataclass(frozen=True)
class SupervisionLimits:
    """The times and limits of a server's supervision that its declaration does not set.

    Attributes:
        restarts: When it is restarted.
        start_interval_s: Wait between health checks of a server that starts.
        check_interval_s: Wait between health checks of a server that is ready.
        probe_timeout_s: Seconds that a health check may take.
        log_bytes: Size of a log file. The last two are kept.
    """

    restarts: Restarts = field(default_factory=Restarts)
    start_interval_s: float = 0.5
    check_interval_s: float = 5.0
    probe_timeout_s: float = 10.0
    log_bytes: int = 64 * 2**20


class ServerProcess:
    """A running replica of a server: the model of a worker in a pool of servers.

    The constructor returns when the server is ready. A thread then supervises it: it is restarted
    on the same ports after it has exited or hung. See `SupervisionLimits` for the times. Its
    methods may be called from any thread.
    """

    starting: ClassVar[ServerProcess | None] = None
    """The server that this process is constructing; its constructor has not returned yet."""

    def __init__(
        self, launch: Launch, host: str = "", limits: SupervisionLimits | None = None
    ) -> None:
        self._launch = launch
        self._limits = limits or SupervisionLimits()
        self._host = host or _node_address()
        self._key = ""
        if launch.key_env is not None:
            self._key = secrets.token_urlsafe(32)
            keep_variables({launch.key_env: self._key})
        keep_arguments(dict(launch.env), *flags(launch.command))
        self._folder = new_temporary_folder("server-", worker_folder("servers"))
        if launch.payload:
            _write_private(os.path.join(self._folder, "payload"), launch.payload)
        name = re.sub(r"[^A-Za-z0-9_.\-]", "_", launch.label)[:80]
        name = f"vane-server-{name}-{os.getpid()}-{secrets.token_hex(3)}"
        path = os.path.join(_ray_logs() or self._folder, f"{name}.log")
        self._log = ServerLog(path, self._limits.log_bytes)
        self._log_start = 0
        self._ports: list[int] = []
        self._command: Sequence[str] = launch.command
        self._guard: GuardedServer | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._state: ServerState = "starting"
        self._reason = ""
        self._ready_at: float | None = None
        self._restarts = 0
        self._thread = threading.Thread(
            target=self._supervise, name=f"supervisor of {launch.label}", daemon=True
        )
        ServerProcess.starting = self
        self._thread.start()
        try:
            self._settled.wait()
        except BaseException:
            self.stop()
            raise
        finally:
            ServerProcess.starting = None
        if (status := self.status()).state == "failed":
            self._log.close()
            command = shlex.join(self._command)
            raise ModelLoadError(
                f"Server {launch.label!r} did not start: {status.reason}\nCommand: {command}"
            )

    def status(self) -> ServerStatus:
        """Return the state of the server. It is not asked for it, so this never blocks."""
        with self._lock:
            runs = self._guard is not None and not self._guard.ended.is_set()
            # The supervisor will notice that a server that was ready has ended.
            state = "restarting" if self._state == "ready" and not runs else self._state
            life = (self._restarts, state == "restarting")
            has_address = state in ("ready", "restarting")
            return ServerStatus(
                state=state,
                endpoint=replace(self._endpoint(), life=life) if has_address else None,
                pid=self._guard.pid if self._guard is not None and runs else None,
                restarts=self._restarts,
                reason=self._reason,
                log_path=self._log.path,
            )

    def check_health(self) -> None:
        """Raise an exception if the server is gone for good."""
        if self._state in ("failed", "stopped"):
            raise RuntimeError(f"Server {self._launch.label!r} {self._state}: {self._reason}")

    def log(self, lines: int) -> str:
        """Return the last lines of the server's log, with secrets masked."""
        return self._log.tail(lines)

    def stop(self) -> None:
        """End the server and all its processes: SIGTERM, after `drain_timeout_s` SIGKILL.

        Only the command's own process gets SIGTERM. Returns after all of them have ended. Further
        calls wait too.
        """
        with self._lock:
            self._stopping.set()
            self._state = "stopped"
            guard = self._guard
        if guard is not None:
            guard.end(self._launch.drain_timeout_s)
        self._thread.join()
        self._log.close()

    def _supervise(self) -> None:
        failure = ""
        try:
            failure = self._run(replace(self._limits.restarts))
        except _HopelessError as error:
            failure = self._with_log(str(error))
        except Exception as error:
            failure = f"its supervisor failed: {described(error)}"
        finally:
            if self._guard is not None:
                self._guard.end(0.0)
            if failure and not self._stopping.is_set():
                self._note("failed", failure)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, "payload"))
            else:  # the log of a server that has failed is kept
                shutil.rmtree(self._folder, ignore_errors=True)
            self._settled.set()

    def _run(self, policy: Restarts) -> str:
        """Start and restart the server until it is stopped."""
        deadline = time.monotonic() + self._launch.startup_timeout_s
        delay: float | None = 0.0
        while delay is not None:
            if self._stopping.wait(delay):
                return ""
            if self._ready_at is not None:
                deadline = time.monotonic() + self._launch.startup_timeout_s
            try:
                ready_at = self._start(deadline)
                policy.record_ready()
                reason = self._watch()
                delay = policy.after_crash(time.monotonic() - ready_at)
            except _StartError as error:
                reason = str(error)
                delay = policy.after_failed_start()
            state: ServerState = "restarting" if self._ready_at is not None else "starting"
            self._note(state, self._with_log(reason))
        return self._with_log(f"{policy.exhausted}; the last time it {reason}")

    def _start(self, deadline: float) -> float:
        """Start the server, and return the time when it is ready."""
        launch, limits = self._launch, self._limits
        is_restart = self._ready_at is not None
        unused = [0] * len(launch.ports)
        try:
            self._ports = self._free(self._ports if is_restart else unused)
        except OSError:
            self._ports = self._free(unused)
        values = {
            "host": self._host,
            "folder": str(self._folder),
            "payload": os.path.join(self._folder, "payload"),
            "python": sys.executable,
            "triton_runner": triton_runner.__file__,
            "cloudpickle": os.path.dirname(cloudpickle.__file__),
        }
        values |= {name: str(port) for name, port in zip(launch.ports, self._ports)}
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        for name in _THREADS:  # for the worker itself; the server has threads of its own
            env.pop(name, None)
        env |= {name: _filled(value, values) for name, value in launch.env.items()}
        if launch.key_env is not None:
            env[launch.key_env] = self._key
        self._command = [_filled(part, values) for part in launch.command]
        self._log_start = self._log.end
        began = time.monotonic()
        with self._lock:
            if self._stopping.is_set():
                raise _StartError("was stopped")
            guard = self._guard = GuardedServer(
                self._command,
                env,
                label=launch.label,
                log=self._log.write,
                folder=str(self._folder),
            )
        while True:
            if guard.ended.wait(limits.start_interval_s):
                if guard.error:
                    raise _HopelessError(guard.error)
                seconds = time.monotonic() - began
                raise _StartError(f"{guard.outcome} {seconds:.1f} s after its start")
            left = max(deadline - time.monotonic(), 0.1)
            problem = health_problem(self._endpoint(), min(limits.probe_timeout_s, left))
            now = time.monotonic()
            if not problem:
                break
            if now >= deadline:
                guard.end(0.0)
                waited = f"{launch.startup_timeout_s:g} s (startup_timeout_s)"
                error = f"was not ready within {waited}: GET {launch.health}: {problem}"
                raise (_StartError if is_restart else _HopelessError)(error)
        with self._lock:
            if not self._stopping.is_set():
                self._state = "ready"
            self._ready_at = now
            self._restarts += is_restart
        self._settled.set()
        return now

    def _watch(self) -> str:
        """Check a server that is ready, and return after it has ended."""
        launch, guard = self._launch, self._guard
        assert guard is not None
        answered_at = time.monotonic()
        problem = ""
        while True:
            if guard.ended.wait(self._limits.check_interval_s):
                return guard.outcome
            if self._stopping.is_set():  # it may drain, without an answer to health checks
                guard.end(launch.drain_timeout_s)
                return guard.outcome
            problem = health_problem(self._endpoint(), self._limits.probe_timeout_s)
            silent = time.monotonic() - answered_at
            if not problem:
                answered_at = time.monotonic()
            elif silent >= launch.liveness_timeout_s:
                reason = f"was not healthy for {silent:.0f} s: GET {launch.health}: {problem}"
                self._note("restarting", reason)
                guard.end(0.0)
                return reason

    def _note(self, state: ServerState, reason: str) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._state = state
            self._reason = masked(reason)

    def _with_log(self, reason: str) -> str:
        """Append the log's last lines since the last start to a reason."""
        tail = self._log.tail(since=self._log_start)
        where = f"{self._log.path} on {socket.gethostname()}"
        return f"{reason}\nLast lines of its log ({where}):\n{tail}" if tail else reason

    def _free(self, ports: Iterable[int]) -> list[int]:
        """Return ports that no process uses now; each 0 is replaced by one."""
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.socket()) for _ in ports]
            for one, port in zip(held, ports):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite TIME_WAIT
                one.bind((self._host, port))
            return [one.getsockname()[1] for one in held]

    def _endpoint(self) -> Endpoint:
        ports = dict(zip(self._launch.ports, self._ports))
        return Endpoint(
            url=f"http://{self._host}:{self._ports[0]}",
            grpc_url=f"grpc://{self._host}:{ports['grpc_port']}" if "grpc_port" in ports else "",
            model=self._launch.model,
            api_key=self._key,
            health=self._launch.health,
            node=socket.gethostname(),
        )


def _node_address() -> str:
    ray = connected_ray()
    return str(ray.util.get_node_ip_address()) if ray else "127.0.0.1"


def _ray_logs() -> str:
    """Return the folder of this Ray node's logs; empty if this process is not connected to Ray."""
    ray = connected_ray()
    if ray is None:
        return ""
    (raylet,) = (n["RayletSocketName"] for n in ray.nodes() if n["NodeID"] == own_node_id())
    return os.path.join(os.path.dirname(os.path.dirname(raylet)), "logs")


def _filled(text: str, values: dict[str, str]) -> str:
    """Replace placeholders, and nothing else: commands may contain JSON."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _write_private(path: str, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
