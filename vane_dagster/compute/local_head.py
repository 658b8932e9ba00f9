"""The local Ray head: started on first use, outlives the run, and is reused by the next run.

There is one head for each Python environment. It listens on the loopback address only and requires
a token from every driver; only its user can read the token file. It stops after it has been idle
for long enough (`idle_watcher`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vane_dagster._home import HOME, state_home
from vane_dagster._private_folder import MARK, is_private_folder, private_folder
from vane_dagster.compute.connection import LOOPBACK_ONLY, connect
from vane_dagster.compute.processes import end, marked
from vane_dagster.errors import ComputeError
from vane_dagster.storage.codec import Codec

START_SECONDS = 60.0
_ACCEPT_SECONDS = 5.0

# A socket path has at most 103 bytes on macOS, 107 on Linux. Ray's are in the head's folder.
_MAX_TEMP_DIR_LENGTH = 103 - len(
    "/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
)
_MAX_HOME_LENGTH = _MAX_TEMP_DIR_LENGTH - len("/0123456789abcdef/t")

_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns on every driver's terminal if there are more workers than four times the startup
    # concurrency, which it derives from the CPUs; on a laptop, warm pools exceed that.
    "RAY_worker_maximum_startup_concurrency": "32",
    # Ray starts a process for each CPU ahead: with the head, not with the first driver.
    "RAY_enable_worker_prestart": "1",
    "RAY_prestart_worker_first_driver": "0",
}

RAY_START = (
    "import sys; "
    "others = ['ray.serve', 'ray.dashboard.modules.job.cli', 'ray.util.state.state_cli']; "
    "sys.modules.update(dict.fromkeys(others)); "
    "from ray.scripts import scripts; "
)
"""Imports ``ray start`` without the other commands of ``ray``, which import Ray Serve."""

# `ray start` opens a Ray Client port if grpc is installed. There is no option for it.
_LAUNCH = (
    f"{RAY_START}scripts.get_ray_client_dependency_error = lambda: 'not wanted'; scripts.main()"
)

_OPTIONS = (
    "--node-ip-address=127.0.0.1",
    "--port=0",
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
    "--include-dashboard=false",
    # It forwards the output of workers to drivers, which `connect` does not ask for.
    "--include-log-monitor=false",
    # The autoscaler, which has no machine to add. It also makes the report of `ray status`.
    "--no-monitor",
    "--log-color=false",
)

# Forks first: the watcher is then no child of the driver and leaves no zombie there.
_WATCH = (
    "import os, sys; os.fork() and os._exit(0); sys.path.append(sys.argv[1]); "
    "from vane_dagster.compute.idle_watcher import watch; watch(sys.argv[2])"
)

# Variables of the process that starts the head, which must not reach workers of later runs.
_NOT_INHERITED = (
    "PYTHONPATH",
    "PYTEST_",
    "RAY_ADDRESS",
    "RAY_AUTH_",
    "RAY_CLIENT_MODE",
    "RAY_JOB_",
    "RAY_NAMESPACE",
    "RAY_OVERRIDE_",
    "RAY_RAYLET_PID",
    "RAY_REDIS_",
    "RAY_RUNTIME_ENV",
    "RAY_START_HOOK",
    "RAY_TMPDIR",
)


@dataclass(frozen=True)
class Head:
    """A running head, as recorded in the state folder.

    Attributes:
        pid: Process id of the GCS server.
        settings: The requested options of ``ray start``.
        name: See `LocalHead`.
    """

    address: str
    pid: int
    session_dir: str
    token_path: str
    started_at: float
    prefix: str
    settings: tuple[str, ...]
    name: str

    def alive(self) -> bool:
        """Whether the GCS and the raylet accept connections, as processes that hang do too."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _ACCEPT_SECONDS).close()
            with socket.socket(socket.AF_UNIX) as raylet:
                raylet.settimeout(_ACCEPT_SECONDS)
                raylet.connect(f"{self.session_dir}/sockets/raylet")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):  # it hangs, and its queue of connections is full
            pass
        return True


_HEAD_CODEC = Codec(Head)


@dataclass(frozen=True)
class HeadUsage:
    """Last use of a head, and how long it may stay idle.

    Attributes:
        last_used: Unix time in seconds at which a driver was last seen.
        idle_minutes: Minutes without a driver after which the head stops; None: it never does.
    """

    last_used: float
    idle_minutes: float | None

    def stops_at(self) -> float | None:
        """Unix time in seconds at which an idle head stops; None: never."""
        return None if self.idle_minutes is None else self.last_used + self.idle_minutes * 60


class HeadFolder:
    """The state folder of a head, of this Python environment or another: everything but its start.

    There are two lock files. A process that starts or ends the head holds ``lock``. The watcher
    holds ``watcher``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Ray opens its own folder to everyone, so it is created in a private one. Its path
        # depends on the state folder alone: the process that stops the head derives it again.
        self.temp_dir = folder / "t"
        if len(os.fsencode(self.temp_dir)) > _MAX_TEMP_DIR_LENGTH:
            self.temp_dir = Path(f"/tmp/vane-{os.getuid()}-{_digest(str(folder), 8)}")
        self.watcher_log = folder / "watcher.log"

    def find(self) -> Head | None:
        """The running head, or None."""
        head = self.read()
        return head if head is not None and head.alive() else None

    def stop(self) -> bool:
        """End every process of this head, and of no other; return whether there was one.

        The processes are identified by their mark, so they end even if the folder is missing.
        """
        with self._flock() if self._verify_folder() else contextlib.nullcontext():
            stopped = self._clean()
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        return stopped

    def stop_if(self, condition: Callable[[], bool]) -> bool:
        """End the head if the condition holds under the lock.

        Unlike `stop`, this keeps Ray's logs.
        """
        with self._flock(wait=False) as locked:
            if not (locked and condition()):
                return False
            self._clean()
            self._discard_files()
            return True

    def use(self) -> HeadUsage:
        """Last use of the head. One that no `LocalCluster` started never stops."""
        try:
            file = self.folder / "use.json"
            return HeadUsage(file.stat().st_mtime, json.loads(file.read_text())["idle_minutes"])
        except (OSError, ValueError, TypeError, KeyError):
            return HeadUsage(0.0, None)

    def touch(self, now: float) -> None:
        """Record a use at a Unix time in seconds, by this machine's clock, not a file server's."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / "use.json", (now, now))

    def _set_idle_minutes(self, idle_minutes: float | None) -> None:
        """Record a use and its setting; start a watcher if one is needed and none runs.

        The caller holds the lock.
        """
        _write_private(self.folder / "use.json", json.dumps({"idle_minutes": idle_minutes}))
        self.touch(time.time())
        if idle_minutes is not None:
            with self._flock("watcher", wait=False) as free:
                if free:
                    self._start_watcher(free)

    def _start_watcher(self, lock: IO[str]) -> None:
        """Start the watcher, which inherits the locked file and so holds the lock until it ends."""
        package = str(Path(__file__).resolve().parents[2])
        with open(self.watcher_log, "wb") as log:
            subprocess.run(
                [sys.executable, "-c", _WATCH, package, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )

    def read(self) -> Head | None:
        """The record of the head, dead or alive."""
        # A record that another user wrote would connect drivers to that user's head.
        if not self._verify_folder():
            return None
        try:
            return _HEAD_CODEC.load(json.loads((self.folder / "head.json").read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            # Written by another version of this module, or not at all: `_clean` handles the rest.
            return None

    def _verify_folder(self, create: bool = False) -> bool:
        """Whether the state folder exists. An existing folder must be private."""
        try:
            if create:
                private_folder(self.folder, HOME)
                return True
            return is_private_folder(self.folder, HOME)
        except OSError as error:
            raise ComputeError(
                f"The state folder {self.folder} of the local Ray head cannot be used: {error}. "
                f"Set {HOME} to a folder that you can write to."
            ) from error

    def _clean(self) -> bool:
        """End the processes with this head's mark, and drop its record; the caller holds the lock.

        Return whether there were any.
        """
        ended = end(self.mark)
        for name in ("head.json", "token", "use.json"):
            (self.folder / name).unlink(missing_ok=True)
        return ended

    def _discard_files(self) -> None:
        """Delete the files of dead heads, including spilled objects, except the last one's logs."""
        sessions = sorted(p for p in self.temp_dir.glob("r/session_2*") if not p.is_symlink())
        last = [path for s in sessions[-1:] for path in s.iterdir() if path.name != "logs"]
        for path in [*sessions[:-1], *last, self.temp_dir / "code", self.temp_dir / "spill"]:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def mark(self) -> str:
        """Value in the environment of each of the head's processes. See `MARK`."""
        return str(self.temp_dir)

    @contextlib.contextmanager
    def _flock(self, name: str = "lock", wait: bool = True) -> Iterator[IO[str] | None]:
        """Hold a lock file, and yield it; yield None if it is taken and `wait` is False."""
        import fcntl

        path, locked = self.folder / name, True
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(open(path, "w"))
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                locked = False
            except OSError as error:
                raise ComputeError(
                    f"{path} cannot be locked: {error.strerror}. Set {HOME} to a folder of your "
                    "own on a file system that supports file locks, such as a local disk."
                ) from error
            yield file if locked else None


class LocalHead(HeadFolder):
    """Finds, starts and stops the Ray head of this Python environment."""

    def __init__(
        self,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        resources: Mapping[str, float] | None = None,
        object_store_memory: int | None = None,
        home: str | Path | None = None,
        name: str = "default",
        idle_minutes: float | None = None,
    ) -> None:
        asked = {
            "num-cpus": num_cpus,
            "num-gpus": num_gpus,
            "resources": json.dumps(dict(sorted(resources.items()))) if resources else None,
            "object-store-memory": object_store_memory,
        }
        self.settings = tuple(
            f"--{key}={value}" for key, value in asked.items() if value is not None
        )
        self.name = name
        self.idle_minutes = idle_minutes
        self.ray_version = _version("ray")
        # Includes the host: homes are shared over networks, and by containers with their host.
        identity = [os.getuid(), platform.node(), sys.prefix, platform.python_version()]
        super().__init__(_home(home) / _digest([*identity, self.ray_version, name], 16))
        self.log_path = self.folder / "ray-start.log"

    def ensure(self) -> Head:
        """Return the running head, with this object's idle time; start one if there is none."""
        self._verify_folder(create=True)
        with self._flock():
            head = self.read()
            if head is None or not head.alive():
                head = self._start()
            self._check_settings(head)
            self._set_idle_minutes(self.idle_minutes)
        return head

    def connect(self, start: bool = True) -> Head | None:
        """Connect this process to the head."""
        head = self.ensure() if start else self.find()
        if head is not None:
            self.touch(time.time())  # it is not idle
            connect(head)
        return head

    def _start(self) -> Head:
        """Start a head; the caller holds the lock."""
        self._clean()
        private_folder(self.temp_dir, f"{HOME}, in at most {_MAX_HOME_LENGTH} bytes,")
        self._discard_files()
        _write_private(self.folder / "token", secrets.token_hex(32))
        try:
            self._launch()
            head = self._describe()
        except BaseException:
            end(self.mark)
            raise
        _write_private(self.folder / "head.json", json.dumps(_HEAD_CODEC.record(head), indent=1))
        return head

    def _launch(self) -> None:
        """Run ``ray start`` in its own session: in the starter's, the head would die with it."""
        command = [sys.executable, "-c", _LAUNCH, "start", "--head", *_OPTIONS, *self.settings]
        command += [f"--temp-dir={self.temp_dir / 'r'}"]
        with open(self.log_path, "wb") as log:
            try:
                code = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.folder,
                    env=self._environment(),
                    start_new_session=True,
                    timeout=START_SECONDS,
                ).returncode
                problem = f"ray start ended with exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                problem = f"ray start was not ready after {START_SECONDS:g} s"
        if problem:
            raise ComputeError(
                f"The local Ray head {self.name!r} did not start: {problem}. "
                f"Ray says: {_reason(self.log_path)} (asked for: "
                f"{' '.join(self.settings) or 'defaults'}; whole log: {self.log_path})"
            )

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")}
        return {**kept, **LOOPBACK_ONLY, **token, **_RAY_SETTINGS, MARK: self.mark}

    def _describe(self) -> Head:
        """Describe the launched head, from Ray's own files and the process table."""
        ray_dir = self.temp_dir / "r"
        address = (ray_dir / "ray_current_cluster").read_text().strip()
        if not address.startswith("127.0.0.1:"):
            raise ComputeError(
                f"The local Ray head listens on {address}, expected 127.0.0.1: it was ended at "
                f"once. Ray {self.ray_version} does not keep to the loopback address; use a "
                "version that vane_dagster was tested with."
            )
        pids = {name: pid for pid, name in marked(self.mark).items()}
        if not {"gcs_server", "raylet"} <= set(pids):
            raise ComputeError(
                f"The local Ray head {self.name!r} died right after its start. "
                f"Ray's logs: {ray_dir / 'session_latest' / 'logs'}"
            )
        return Head(
            address=address,
            pid=pids["gcs_server"],
            session_dir=str((ray_dir / "session_latest").resolve()),
            token_path=str(self.folder / "token"),
            started_at=time.time(),
            prefix=sys.prefix,
            settings=self.settings,
            name=self.name,
        )

    def _check_settings(self, head: Head) -> None:
        missing = [setting for setting in self.settings if setting not in head.settings]
        if missing:
            raise ComputeError(
                f"The local Ray head {self.name!r} already runs with "
                f"{' '.join(head.settings) or 'defaults'}, but this asks for {' '.join(missing)}. "
                f"Stop it with `vane-dagster cluster stop --name {shlex.quote(self.name)}` (what "
                "is loaded there is lost), or give the other head its own name."
            )


def _home(home: str | Path | None) -> Path:
    return state_home() if home is None else Path(os.path.abspath(Path(home).expanduser()))


_version = functools.cache(importlib.metadata.version)


def _digest(parts: object, length: int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:length]


def _write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable by this user alone."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def _reason(log: Path) -> str:
    """The last line of a log: the exception, if there is one."""
    return (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
