"""Applies a round's plan to processes, and starts the disturbed runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from support import chaos_driver, forked
from support.chaos_plan import TINY_KB, Kill
from support.paths import REPOSITORY, TESTS
from vane_dagster import testing
from vane_dagster._failpoints import VARIABLE

MAX_SECONDS = 150.0
_LOOKS_SECONDS = 0.02
_MAX_LAST_RUNS = 4
_NO_HEARTBEAT = "the pool manager received no heartbeat from this run"
_ROOMY = "32m"


@dataclass
class Place:
    """The environment of a round's runs.

    Attributes:
        source: The source's folder.
        cluster: The local cluster's settings; None for subprocesses.
        raylet: The cluster's raylet.
        blocks: The faults of the round's runs.
        happened: Log lines of the round.
    """

    source: Path
    cluster: dict[str, Any] | None
    raylet: psutil.Process | None
    blocks: contextlib.ExitStack
    happened: list[str] = field(default_factory=list)

    def run(
        self,
        root: Path,
        labels: str,
        faults: list[testing.Fault],
        partition: str | None = None,
        kills: tuple[Kill, ...] = (),
        former: bool = False,
    ) -> int:
        """Execute one run to its end, successful or not, and return the driver's exit status."""
        options = {
            "root": str(root),
            "source": str(self.source),
            "labels": labels,
            "cluster": self.cluster,
            "partition": partition,
            "former": former,
        }
        injected = self.blocks.enter_context(testing.faults(*faults))
        # The queued work of a killed run executes later and must meet the same faults. So the
        # block ends with the round, and its variable is removed until then.
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        env["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(REPOSITORY)])
        del os.environ[VARIABLE]
        started, before = time.monotonic(), _files(root)
        program = [chaos_driver.__file__, json.dumps(options)]
        with open(root / "log", "a") as out, open(root / "log", "a") as err:
            output = {out.fileno(): 1, err.fileno(): 2}
            driver = forked.server(forked.DRIVER).start(program, env, output)
        self._kill(driver, kills, lambda: _files(root) != before)
        ended = _has_ended(driver, max(1.0, started + MAX_SECONDS - time.monotonic()))
        driver.kill()
        status = driver.wait()
        seconds = time.monotonic() - started
        self._note(f"run ended with {status} after {seconds:.1f} s; fired: {injected.fired}")
        if status == chaos_driver.FAILED:
            failure = (root / "log").read_text().rpartition(chaos_driver.FAILURE)[2].strip()
            self._note("  " + " ".join(failure.split())[:300])
        assert ended, f"the run did not end within {MAX_SECONDS:g} s\n{self.summary(root)}"
        return status

    def finish(self, root: Path, labels: str, faults: list[testing.Fault]) -> None:
        """Execute the final run; repeat it if a busy machine missed heartbeats."""
        for _ in range(_MAX_LAST_RUNS):
            status = self.run(root, labels, faults)
            if status == chaos_driver.RAN:
                return
            if _NO_HEARTBEAT not in self.happened[-1]:
                break
        raise AssertionError(f"the last run ended with {status}")

    def summary(self, root: Path) -> str:
        """Describe the events of a round, for a message."""
        log = root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        shown = [line for line in lines if " - DEBUG - " not in line][-60:]
        return "\n".join([*self.happened, f"the end of {log}:", *shown])

    def _note(self, text: str) -> None:
        self.happened.append(text)

    def _kill(
        self, driver: forked.Forked, kills: tuple[Kill, ...], is_working: Callable[[], bool]
    ) -> None:
        draw = random.Random(str(kills))
        started, working = time.monotonic(), False
        for kill in kills:
            if kill.at_work and not working:
                while not is_working() and not _has_ended(driver, _LOOKS_SECONDS):
                    pass
                started, working = time.monotonic(), True
            if _has_ended(driver, max(0.0, started + kill.seconds - time.monotonic())):
                return
            victims = [driver.pid] if kill.kind == "driver" else self._evictable(kill.kind, driver)
            if not victims:
                self._note(f"{kill}: there is none")
                continue
            pid = draw.choice(sorted(victims))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._note(f"{kill}: killed {pid}")

    def _evictable(self, kind: str, driver: forked.Forked) -> list[int]:
        """Return living processes of a kind: of the session's head, or the driver's children."""
        titles = {
            "worker": "ray::HostActor",
            "pool_manager": "ray::PoolManager",
            "idle": "ray::IDLE",
        }
        parent = self.raylet or psutil.Process(driver.pid)
        found = []
        for child in parent.children():
            with contextlib.suppress(psutil.Error):
                title = " ".join(child.cmdline())
                if self.raylet is None or title.startswith(titles[kind]):
                    found.append(child.pid)
        return found


def _has_ended(driver: forked.Forked, seconds: float) -> bool:
    """Return whether a run ends within a time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        driver.wait(seconds)
    return driver.poll() is not None


def _files(root: Path) -> int:
    """Count the files of a round, except its log."""
    return sum(len(files) for place in ("store", "out") for _, _, files in os.walk(root / place))


@contextlib.contextmanager
def small_disk(folder: Path, kb: int) -> Iterator[Callable[[], None]]:
    """Mount a file system of a few KB at a folder, and yield a function that enlarges it."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kb}k", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)

    def grow() -> None:
        subprocess.run(["mount", "-o", f"remount,size={_ROOMY}", str(folder)], check=True)

    try:
        yield grow
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether a test can mount a small file system: only as root, and not in most containers."""
    if os.geteuid() != 0:
        return False
    try:
        with small_disk(folder, TINY_KB[0]):
            return True
    except subprocess.CalledProcessError:
        return False
