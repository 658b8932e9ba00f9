"""One replica of a server in a worker process: start, supervision, restart, end."""

from __future__ import annotations

import contextlib
import http.client
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
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # no stubs

from vane_dagster._private_folder import new_temporary_folder, worker_folder
from vane_dagster._secrets import keep_arguments, keep_variables, masked
from vane_dagster.errors import ModelLoadError, described
from vane_dagster.servers import triton_runner
from vane_dagster.servers.guard import GuardedServer
from vane_dagster.servers.launch import Endpoint, Launch, ServerState, ServerStatus
from vane_dagster.servers.restart_policy import RestartPolicy, SupervisionLimits
from vane_dagster.servers.server_log import ServerLog

_BODY_BYTES = 2**24
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class _StartError(Exception):
    """The server did not become ready."""


class _HopelessError(Exception):
    """Another start of the server would fail too."""


@dataclass(frozen=True)
class _End:
    """Why a server that was ready has ended; a planned end is no crash."""

    reason: str
    is_planned: bool = False


class ServerProcess:
    """A running replica of a server: the model of a worker in a pool of servers.

    The constructor returns when the server is ready. A thread then supervises it: it is restarted
    on the same ports after it has exited, hung or outgrown its memory limit. See
    `SupervisionLimits` for the times. Its methods may be called from any thread.

    Args:
        launch: How the server is started.
        host: The address to bind to. Default: the Ray node's address if this process is
            connected to Ray, else 127.0.0.1.
        limits: The times and limits of the supervision.

    Raises:
        ModelLoadError: The server did not become ready.
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
        prefix = os.path.join(_ray_logs() or self._folder, name)
        self._log = ServerLog(prefix, self._limits.log_bytes)
        self._log_start = 0
        self._held: list[socket.socket] = []
        self._ports: list[int] = []
        self._command: Sequence[str] = launch.command
        self._guard: GuardedServer | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._state: ServerState = "starting"
        self._reason = self._failure = ""
        self._ready_at: float | None = None
        self._startup_seconds: float | None = None
        self._restarts = 0
        self._in_flight: int | None = None
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
        if self._failure:
            command = shlex.join(self._command)
            raise ModelLoadError(
                f"Server {launch.label!r} did not start: {self._failure}\nCommand: {command}"
            )

    def status(self) -> ServerStatus:
        """Return the state of the server. It is not asked for it, so this never blocks."""
        with self._lock:
            runs = self._guard is not None and not self._guard.has_exited
            state = self._state
            if state == "ready" and not runs:  # the supervisor will notice
                state = "restarting"
            is_ready = state == "ready"
            uptime = None
            if is_ready and self._ready_at is not None:
                uptime = time.monotonic() - self._ready_at
            return ServerStatus(
                state=state,
                endpoint=self._endpoint() if is_ready else None,
                pid=self._guard.pid if self._guard is not None and runs else None,
                startup_seconds=self._startup_seconds,
                uptime_seconds=uptime,
                restarts=self._restarts,
                in_flight=self._in_flight if is_ready else None,
                reason=self._reason,
                log_path=self._log.path,
            )

    def check_health(self) -> None:
        """Raise an exception if the server is gone for good.

        Raises:
            RuntimeError: It has failed too often, or was stopped.
        """
        status = self.status()
        if status.state in ("failed", "stopped"):
            reason = f": {status.reason}" if status.reason else ""
            raise RuntimeError(f"Server {self._launch.label!r} has {_PAST[status.state]}{reason}")

    def read_log(self, offset: int, limit: int) -> tuple[bytes, int]:
        """Read a part of the server's log, with secrets masked.

        Args:
            offset: Position of its first byte; a negative one counts from the end.
            limit: The largest number of bytes to read.

        Returns:
            The bytes, and the position after them, at which the next part starts.
        """
        return self._log.read(offset, limit)

    def stop(self) -> None:
        """End the server and all its processes: SIGTERM, after `drain_timeout_s` SIGKILL.

        Only the command's own process gets SIGTERM. Returns after all of them have ended. Further
        calls wait too.

        Raises:
            RuntimeError: Processes are left that SIGKILL does not end.
        """
        with self._lock:
            self._stopping.set()
            self._state = "stopped"
            guard = self._guard
        has_ended = True
        if guard is not None:
            guard.stop(self._launch.drain_timeout_s)
            has_ended = guard.wait(self._launch.drain_timeout_s)
        self._thread.join()
        if not has_ended:
            raise RuntimeError(
                f"Server {self._launch.label!r} has processes that could not be killed. End the "
                f"descendants of processes {guard.guard_pids if guard else []}."
            )

    def _supervise(self) -> None:
        policy = RestartPolicy(self._limits)
        failure = ""
        try:
            failure = self._run(policy)
        except _HopelessError as error:
            failure = self._with_log(str(error))
        except Exception as error:
            failure = f"its supervision failed: {described(error)}"
        finally:
            self._release()
            if self._guard is not None:
                self._guard.stop(0.0)
                self._guard.wait(0.0)
            if failure and not self._stopping.is_set():
                self._note("failed", failure)
                self._failure = failure
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, "payload"))
            else:  # the log of a server that has failed is kept
                shutil.rmtree(self._folder, ignore_errors=True)
            self._settled.set()

    def _run(self, policy: RestartPolicy) -> str:
        """Start and restart the server until it is stopped.

        Returns:
            Why it was given up; empty if it was stopped.
        """
        deadline = time.monotonic() + self._launch.startup_timeout_s
        delay: float | None = 0.0
        while delay is not None:
            if self._stopping.wait(delay):
                return ""
            is_restart = self._ready_at is not None
            if is_restart:
                deadline = time.monotonic() + self._launch.startup_timeout_s
            self._log_start = self._log.end()
            try:
                self._start(deadline)
            except _StartError as error:
                reason = str(error)
                delay = policy.after_failed_start()
                self._reserve(keep=is_restart)
            else:
                if self._stopping.is_set():
                    return ""
                now = time.monotonic()
                policy.record_ready(now)
                self._note_ready(now, is_restart)
                end = self._watch()
                reason = end.reason
                delay = 0.0 if end.is_planned else policy.after_crash(time.monotonic())
                self._reserve(keep=True)
            state: ServerState = "restarting" if self._ready_at is not None else "starting"
            self._note(state, self._with_log(reason))
        return self._with_log(f"{policy.exhausted}; the last time it {reason}")

    def _start(self, deadline: float) -> None:
        """Start the server, and return when it is ready.

        Args:
            deadline: Time by which it must be ready.

        Raises:
            _StartError: It has exited, or was not ready in time.
            _HopelessError: The same, and another start would fail too.
        """
        launch, limits = self._launch, self._limits
        if not self._held:
            self._reserve(keep=False)
        self._release()
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
        began = time.monotonic()
        with self._lock:
            if self._stopping.is_set():
                return
            guard = self._guard = GuardedServer(
                self._command,
                env,
                label=launch.label,
                log=self._log.prefix,
                log_bytes=limits.log_bytes,
                folder=str(self._folder),
            )
        delay = limits.first_poll_s
        while True:
            if guard.ended.wait(delay):
                if guard.error:
                    raise _HopelessError(guard.error)
                seconds = time.monotonic() - began
                raise _StartError(f"{guard.outcome} {seconds:.1f} s after its start")
            left = max(deadline - time.monotonic(), 0.1)
            problem = self._probe(min(limits.probe_timeout_s, left))
            if not problem:
                break
            if time.monotonic() >= deadline:
                self._end(guard, 0.0)
                waited = f"{launch.startup_timeout_s:g} s (startup_timeout_s)"
                error = f"was not ready within {waited}: GET {launch.health}: {problem}"
                raise (_StartError if self._ready_at is not None else _HopelessError)(error)
            delay = min(2 * delay, limits.max_poll_s)
        self._startup_seconds = time.monotonic() - began

    def _watch(self) -> _End:
        """Check a server that is ready, and return after it has ended."""
        launch, guard = self._launch, self._guard
        assert guard is not None
        answered_at = time.monotonic()
        problem = ""
        while True:
            self._in_flight = None if problem else self._measured_in_flight()
            if guard.ended.wait(self._limits.check_interval_s):
                return _End(guard.outcome)
            if self._stopping.is_set():  # it may drain, without an answer to health checks
                guard.wait(launch.drain_timeout_s)
                return _End(guard.outcome)
            problem = self._probe(self._limits.probe_timeout_s)
            silent = time.monotonic() - answered_at
            if not problem:
                answered_at = time.monotonic()
            elif silent >= launch.liveness_timeout_s:
                reason = f"was not healthy for {silent:.0f} s: GET {launch.health}: {problem}"
                self._note("restarting", reason)
                self._end(guard, 0.0)
                return _End(reason)
            if launch.max_rss is not None and (held := self._memory()) > launch.max_rss:
                limit = f"max_rss={launch.max_rss / 2**20:.0f} MiB"
                reason = f"held {held / 2**20:.0f} MiB of memory, {limit}"
                self._note("restarting", reason)  # no new requests while it drains
                self._end(guard, launch.drain_timeout_s)
                return _End(reason, is_planned=True)

    def _end(self, guard: GuardedServer, drain_s: float) -> None:
        guard.stop(drain_s)
        if not guard.wait(drain_s):
            raise _HopelessError("has processes that could not be killed")

    def _note(self, state: ServerState, reason: str) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._state = state
            self._reason = masked(reason)

    def _note_ready(self, now: float, is_restart: bool) -> None:
        with self._lock:
            if not self._stopping.is_set():
                self._state = "ready"
            self._ready_at = now
            self._restarts += is_restart
        self._settled.set()

    def _with_log(self, reason: str) -> str:
        """Append the log's last lines since the last start to a reason."""
        tail = self._log.tail(self._log_start)
        where = f"{self._log.path} on {socket.gethostname()}"
        return f"{reason}\nLast lines of its log ({where}):\n{tail}" if tail else reason

    def _reserve(self, keep: bool) -> None:
        """Hold ports while no server runs.

        Args:
            keep: Whether to hold the ports of the last start, unless they are taken.
        """
        self._release()
        with contextlib.suppress(OSError):
            if keep:
                self._hold(self._ports)
                return
        self._release()
        self._hold([0] * len(self._launch.ports))
        self._ports = [one.getsockname()[1] for one in self._held]

    def _hold(self, ports: Iterable[int]) -> None:
        for port in ports:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            held = socket.socket(family, socket.SOCK_STREAM)
            self._held.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite TIME_WAIT
            held.bind((self._host, port))

    def _release(self) -> None:
        while self._held:
            self._held.pop().close()

    def _endpoint(self) -> Endpoint:
        host = f"[{self._host}]" if ":" in self._host else self._host
        ports = dict(zip(self._launch.ports, self._ports))
        return Endpoint(
            url=f"http://{host}:{self._ports[0]}",
            grpc_url=f"grpc://{host}:{ports['grpc_port']}" if "grpc_port" in ports else "",
            model=self._launch.model,
            api_key=self._key,
            health=self._launch.health,
            node=socket.gethostname(),
        )

    def _probe(self, timeout: float) -> str:
        """Check the server's health; returns what is wrong, or nothing."""
        try:
            status, _ = self._get(self._launch.health, timeout)
        except (OSError, http.client.HTTPException) as error:
            return described(error)
        return "" if 200 <= status <= 299 else f"status {status}"

    def _get(self, path: str, timeout: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._ports[0], timeout=timeout)
        headers = {"Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_BODY_BYTES)

    def _measured_in_flight(self) -> int | None:
        """Return the requests in flight; None if unknown."""
        import psutil

        if self._launch.metrics:
            path, *gauges = self._launch.metrics
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, text = self._get(path, self._limits.probe_timeout_s)
                if status == 200:
                    found = gauge_sum(text.decode(errors="replace"), gauges)
                    return None if found is None else round(found)
            return None
        clients = set()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                for one in process.net_connections("tcp"):
                    is_ours = one.laddr and one.laddr.port in self._ports
                    if is_ours and one.status == psutil.CONN_ESTABLISHED:
                        clients.add(one.raddr)
        return len(clients)

    def _memory(self) -> int:
        """Return the bytes that the server's processes hold in memory alone."""
        import psutil

        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                found = process.memory_info()
                total += found.rss - getattr(found, "shared", 0)
        return total

    def _processes(self) -> list[Any]:
        """Return the server's processes, those in sessions of their own too."""
        import psutil

        if self._guard is None:
            return []
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self._guard.guard_pids[0]).children(recursive=True)
            return [process for process in found if process.pid not in self._guard.guard_pids]
        return []


_PAST = {"failed": "failed", "stopped": "been stopped"}


def gauge_sum(text: str, names: Sequence[str]) -> float | None:
    """Return the sum of some metrics in Prometheus' text format; None if it has none of them.

    Args:
        text: The metrics.
        names: Names of metrics, which are summed up over all labels.
    """
    found = None
    for line in text.splitlines():
        name, _, rest = line.replace("{", " ", 1).partition(" ")
        if name in names:
            with contextlib.suppress(ValueError, IndexError):
                found = (found or 0.0) + float(rest.rpartition("}")[2].split()[0])
    return found


def _node_address() -> str:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return "127.0.0.1"


def _ray_logs() -> str:
    """Return the folder of this Ray node's logs; empty if this process is not connected to Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    node = ray._private.worker._global_node
    return "" if node is None else str(node.get_logs_dir_path())


def flags(command: Sequence[str]) -> list[dict[str, str]]:
    """Return the values of a command line's flags by their names."""
    found = []
    for part, following in zip(command, [*command[1:], ""]):
        if part.startswith("-"):
            name, has_value, value = part.lstrip("-").partition("=")
            found.append({name: value if has_value else following})
    return found


def _filled(text: str, values: dict[str, str]) -> str:
    """Replace placeholders, and nothing else: commands may contain JSON."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _write_private(path: str, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
