"""The local Ray head: started on first use, outlives the run, found again by the next.

One head for each Python environment. It listens on the loopback address only and asks every
driver for a token that lies in a file which only its user can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vane_dagster.commit.home import state_home
from vane_dagster.errors import ComputeError
from vane_dagster.execute.cluster_connect import LOOPBACK_ONLY, connect, connect_environment
from vane_dagster.execute.cluster_processes import MARK, birth, end, marked

__all__ = ["Head", "LocalHead", "connect", "connect_environment"]

START_SECONDS = 60.0

# Ray warns on every driver's terminal of more workers than four times those that may start at
# once, which it takes from the CPUs; warm pools hold more than that on a laptop.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_maximum_startup_concurrency": "32"}

# `ray start` opens a Ray Client port wherever grpc is installed, and has no option against it.
_LAUNCH = (
    "from ray.scripts import scripts; "
    "scripts.get_ray_client_dependency_error = lambda: 'not wanted'; "
    "scripts.main()"
)

# What belongs to the process that starts the head and must not reach workers of later runs.
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
    """A running head, as its record in the state folder says.

    Attributes:
        pid: Of the GCS server; `birth` is its start time, so that a recycled pid is no match.
        settings: What was asked of Ray, as options of ``ray start``.
    """

    address: str
    pid: int
    birth: str
    raylet_pid: int
    raylet_birth: str
    session_dir: str
    token_path: str
    started_at: float
    ray_version: str
    python_version: str
    prefix: str
    settings: tuple[str, ...]

    def alive(self) -> bool:
        """Whether the processes that the record names still run."""
        return (
            birth(self.pid) == self.birth
            and birth(self.raylet_pid) == self.raylet_birth
            and Path(self.session_dir).is_dir()
        )


class LocalHead:
    """Finds, starts and stops the Ray head of this Python environment.

    Args:
        num_cpus: What the head offers; Ray counts the machine's where it is None. So for
            `num_gpus` and `object_store_memory` (bytes).
        resources: Custom resources and their quantities.
        home: Where state lies. Default: ``$VANE_DAGSTER_HOME``, else
            ``$XDG_STATE_HOME/vane_dagster``, else ``~/.local/state/vane_dagster``.
        name: Tells heads of one environment apart.
    """

    def __init__(
        self,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        resources: Mapping[str, float] | None = None,
        object_store_memory: int | None = None,
        home: str | Path | None = None,
        name: str = "default",
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
        self.ray_version = _ray_version()
        # The host too: homes are shared over a network, and containers share them with their host.
        identity = [os.getuid(), platform.node(), sys.prefix, platform.python_version()]
        self.folder = _home(home) / _digest([*identity, self.ray_version, name], 16)
        # Ray's socket paths may not pass 107 bytes, and it opens its own folder to everyone.
        self.temp_dir = Path(f"/tmp/vane-{os.getuid()}-{_digest(str(self.folder), 8)}")
        self.log_path = self.folder / "ray-start.log"

    def find(self) -> Head | None:
        """The running head, or None. The record and the processes of a dead one are cleaned up."""
        head = self._read()
        if head is None or head.alive():
            return head
        with self._lock(wait=False) as locked:
            if locked and self._read() == head:
                self._clean()
        return None

    def ensure(self) -> Head:
        """The running head, started where there is none.

        Raises:
            ComputeError: It can't be started, or one runs with other settings than asked for.
        """
        head = self._read()
        if head is None or not head.alive():
            _private_folder(self.folder)
            with self._lock():
                head = self._read()
                if head is None or not head.alive():
                    head = self._start()
        self._check_settings(head)
        return head

    def stop(self) -> bool:
        """Ends every process of this head, and of no other; whether there was one."""
        if not self.folder.is_dir():
            return False
        with self._lock():
            stopped = self._clean()
            shutil.rmtree(self.temp_dir, ignore_errors=True)
        return stopped

    def _start(self) -> Head:
        """Starts a head; the caller holds the lock."""
        self._clean()
        _private_folder(self.temp_dir)
        self._discard_sessions()
        _write_private(self.folder / "token", secrets.token_hex(32))
        try:
            self._launch()
            head = self._describe()
        except BaseException:
            end(self._mark)
            raise
        _write_private(self.folder / "head.json", json.dumps(asdict(head), indent=1))
        return head

    def _launch(self) -> None:
        """Runs ``ray start`` in a session of its own: a head in its starter's dies with it."""
        command = [sys.executable, "-c", _LAUNCH, "start", "--head", *self.settings]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--port=0"]
        command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--temp-dir={self.temp_dir / 'r'}", "--log-color=false"]
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
        return {**kept, **LOOPBACK_ONLY, **token, **_QUIET, MARK: self._mark}

    def _describe(self) -> Head:
        """What `_launch` brought up, read from Ray's own files and the process table."""
        ray_dir = self.temp_dir / "r"
        address = (ray_dir / "ray_current_cluster").read_text().strip()
        if not address.startswith("127.0.0.1:"):
            raise ComputeError(
                f"The local Ray head listens on {address}, expected 127.0.0.1: it was ended at "
                f"once. Ray {self.ray_version} does not keep to the loopback address; use a "
                "version that vane_dagster was tested with."
            )
        pids = {name: pid for pid, name in marked(self._mark).items()}
        gcs, raylet = pids.get("gcs_server", 0), pids.get("raylet", 0)
        births = birth(gcs), birth(raylet)
        if births[0] is None or births[1] is None:
            raise ComputeError(
                f"The local Ray head {self.name!r} died right after its start. "
                f"Ray's logs: {ray_dir / 'session_latest' / 'logs'}"
            )
        return Head(
            address=address,
            pid=gcs,
            birth=births[0],
            raylet_pid=raylet,
            raylet_birth=births[1],
            session_dir=str((ray_dir / "session_latest").resolve()),
            token_path=str(self.folder / "token"),
            started_at=time.time(),
            ray_version=self.ray_version,
            python_version=platform.python_version(),
            prefix=sys.prefix,
            settings=self.settings,
        )

    def _check_settings(self, head: Head) -> None:
        missing = [setting for setting in self.settings if setting not in head.settings]
        if missing:
            raise ComputeError(
                f"The local Ray head {self.name!r} runs already, started with "
                f"{' '.join(head.settings) or 'defaults'}, but this asks for {' '.join(missing)}. "
                "Stop it with `vane-dagster cluster stop` (what is loaded there is lost), or "
                "give the other one a name of its own."
            )

    def _read(self) -> Head | None:
        try:
            record = json.loads((self.folder / "head.json").read_text())
            return Head(**{**record, "settings": tuple(record["settings"])})
        except (OSError, ValueError, TypeError, KeyError):
            # Written by another version of this module, or not at all: `_clean` sees to the rest.
            return None

    def _clean(self) -> bool:
        """Ends what runs under this head's mark and drops its record; the caller holds the lock."""
        ended = end(self._mark)
        for name in ("head.json", "token"):
            (self.folder / name).unlink(missing_ok=True)
        return ended

    def _discard_sessions(self) -> None:
        """Deletes what dead heads left, spilled objects too, but the last one's logs."""
        sessions = sorted(p for p in self.temp_dir.glob("r/session_2*") if not p.is_symlink())
        for session in sessions[:-1]:
            shutil.rmtree(session, ignore_errors=True)
        for entry in (entry for session in sessions[-1:] for entry in session.iterdir()):
            if entry.is_dir() and entry.name != "logs":
                shutil.rmtree(entry, ignore_errors=True)

    @property
    def _mark(self) -> str:
        return str(self.temp_dir)

    @contextlib.contextmanager
    def _lock(self, wait: bool = True) -> Iterator[bool]:
        """Holds the head's lock file. Yields False where it is taken and `wait` is not set."""
        import fcntl

        with open(self.folder / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


def _home(home: str | Path | None) -> Path:
    return state_home() if home is None else Path(home).expanduser().resolve()


def _ray_version() -> str:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise ComputeError(
            f"The local cluster needs Ray, which {sys.prefix} does not have: pip install ray, or "
            "use LocalCompute."
        ) from error


def _digest(parts: object, length: int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:length]


def _private_folder(path: Path) -> None:
    """Makes a folder that only this user can enter; one that is somebody else's is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ComputeError(
            f"{path} is not a folder of user {os.getuid()} (mode {stat.filemode(found.st_mode)}, "
            f"owner {found.st_uid}): a Ray head there would not be private. Remove it."
        )
    path.chmod(0o700)


def _write_private(path: Path, text: str) -> None:
    """Writes a file whole or not at all, readable by this user alone."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def _reason(log: Path) -> str:
    """The exception that a log ends with, or its last lines."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last_frame = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return " / ".join(line.strip() for line in lines[last_frame + 1 :][-5:]) or "nothing"
