"""Rounds of disturbances: what is to happen, drawn from a seed, and doing it to processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import chaos_driver
import psutil
from chaos_pipeline import KEYS

from vane_dagster import testing
from vane_dagster.failpoints import VARIABLE

MOST_SECONDS = 150.0
FIRST_KILL, LAST_KILL = 0.2, 3.5
TINY, ROOMY = "160k", "32m"


@dataclass(frozen=True)
class Poison:
    """Rows that fail whenever they are computed, by the stage that they fail in."""

    raising: dict[str, tuple[int, ...]]
    killing: dict[str, tuple[int, ...]]

    def ids(self, stage: str) -> set[int]:
        return {*self.raising.get(stage, ()), *self.killing.get(stage, ())}

    def errors(self, stage: str) -> dict[int, str]:
        found = dict.fromkeys(self.raising.get(stage, ()), "PoisonError")
        return {**found, **dict.fromkeys(self.killing.get(stage, ()), "WorkerDied")}

    def faults(self) -> list[testing.Fault]:
        raising = [
            testing.CallFault(stage, ids=ids, error="PoisonError")
            for stage, ids in self.raising.items()
        ]
        killing = [testing.CallFault(stage, "kill", ids=ids) for stage, ids in self.killing.items()]
        return [*raising, *killing]


@dataclass(frozen=True)
class Plan:
    """What one round does.

    Attributes:
        seed: What all of it was drawn from.
        labels: What becomes of rows that cannot be labelled.
        poison: Rows at fault, in the reruns too.
        runs: For each disturbed run its partition (None for all), further faults, and kills: after
            how many seconds, and of what.
        tiny: Whether the store's disk is too small for the disturbed runs.
    """

    seed: int
    labels: str
    poison: Poison
    runs: tuple[tuple[str | None, tuple[testing.Fault, ...], tuple[tuple[float, str], ...]], ...]
    tiny: bool

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: labels {self.labels}, tiny {self.tiny}, {self.poison}"]
        for partition, faults, kills in self.runs:
            lines.append(f"  run of {partition or 'all'}: kills {kills}")
            lines += [f"    {fault}" for fault in faults]
        return "\n".join(lines)


def drawn(seed: int, ids: list[int], kinds: tuple[str, ...], mounts: bool) -> Plan:
    """The plan of a round.

    Args:
        seed: What decides.
        ids: The source's ids.
        kinds: What may be killed besides the driver.
        mounts: Whether small file systems can be mounted.
    """
    draw = random.Random(seed)
    poisoned = draw.sample(ids, 7)
    raising = {
        "scores": tuple(poisoned[: draw.randint(0, 3)]),
        "labels": tuple(poisoned[3 : 3 + draw.randint(0, 2)]),
    }
    killing = {}
    if draw.random() < 0.12:  # a search for it starts a dozen workers
        killing[draw.choice(("scores", "labels"))] = (poisoned[6],)
    tiny = mounts and draw.random() < 0.12
    runs = []
    for number in range(2 if draw.random() < 0.25 else 1):
        faults = [draw.choice(_FAULTS)(draw) for _ in range(draw.randint(0, 2))]
        kills = [
            (round(draw.uniform(FIRST_KILL, LAST_KILL), 2), draw.choice(kinds))
            for _ in range(draw.randint(0, 4))
        ]
        if draw.random() < 0.4:
            kills.append((round(draw.uniform(FIRST_KILL, LAST_KILL), 2), "driver"))
        if not faults and not kills and not tiny and not number:
            kills.append((1.0, "driver"))
        partition = draw.choice((None, None, *KEYS))
        runs.append((partition, tuple(faults), tuple(sorted(kills))))
    return Plan(
        seed,
        draw.choice(("quarantine", "null")),
        Poison({s: ids for s, ids in raising.items() if ids}, killing),
        tuple(runs),
        tiny,
    )


def _some(draw: random.Random, most: int) -> list[int]:
    return sorted(draw.sample(range(1, most), draw.randint(1, 3)))


_FAULTS: tuple[Callable[[random.Random], testing.Fault], ...] = (
    lambda draw: testing.StorageFault(
        "*", "disconnect", draw.choice(("write", "read", "list")), calls=_some(draw, 40)
    ),
    lambda draw: testing.StorageFault(
        draw.choice(("*/store/*", "*/out/*", "*/joined/parts/*")), calls=draw.randint(1, 20)
    ),
    lambda draw: testing.StorageFault("*/manifests/*", "kill", calls=draw.randint(1, 12)),
    lambda draw: testing.StorageFault("*/out/*", "kill", calls=draw.randint(1, 24)),
    lambda draw: testing.StorageFault("*/parts/*", "kill", calls=draw.randint(1, 40)),
    lambda draw: testing.StorageFault("*", "kill", "delete", calls=draw.randint(1, 3)),
    lambda draw: testing.StorageFault("*", "denied", "delete", calls=draw.randint(1, 3)),
    lambda draw: testing.StorageFault("*", "denied", "list", calls=draw.randint(1, 30)),
    lambda draw: testing.CallFault(
        draw.choice(("scores", "labels")), "disconnect", calls=_some(draw, 30)
    ),
    lambda draw: testing.CallFault(
        draw.choice(("scores", "labels")), "kill", calls=draw.randint(1, 40)
    ),
    lambda draw: testing.CallFault(
        draw.choice(("scores", "labels")), "out_of_memory", calls=_some(draw, 30)
    ),
    lambda draw: testing.LoadFault(draw.choice(("Scorer", "Labeller")), "kill", calls=1),
)


@dataclass
class Place:
    """Where a round's runs are done.

    Attributes:
        context: The fork server.
        source: The source's folder.
        cluster: The local cluster's settings; None for subprocesses.
        raylet: The cluster's raylet.
    """

    context: Any
    source: Path
    cluster: dict[str, Any] | None
    raylet: psutil.Process | None
    happened: list[str] = field(default_factory=list)

    def run(
        self,
        root: Path,
        labels: str,
        faults: list[testing.Fault],
        partition: str | None = None,
        kills: tuple[tuple[float, str], ...] = (),
    ) -> int:
        """Does one run to its end, whatever that is, and gives the driver's exit status."""
        options = {
            "root": str(root),
            "source": str(self.source),
            "labels": labels,
            "cluster": self.cluster,
            "partition": partition,
        }
        names = ("VANE_DAGSTER_HOME", "DAGSTER_DISABLE_TELEMETRY")
        with testing.faults(*faults) as injected:
            env = {name: os.environ.get(name) for name in (*names, VARIABLE)}
            started = time.monotonic()
            driver = self.context.Process(
                target=chaos_driver.run, args=(options, env, str(root / "log"))
            )
            driver.start()
            self._kill(driver, started, kills)
            driver.join(max(1.0, started + MOST_SECONDS - time.monotonic()))
            ended = driver.exitcode is not None
            if not ended:
                driver.kill()
                driver.join()
            seconds = time.monotonic() - started
            told = [f"{n} times {f}" for f, n in zip(faults, injected.fired) if n]
            self._note(f"run ended with {driver.exitcode} after {seconds:.1f} s; fired: {told}")
        assert ended, f"the run did not end within {MOST_SECONDS:g} s\n{self.told(root)}"
        return driver.exitcode

    def told(self, root: Path) -> str:
        """What has happened in a round, for a message."""
        log = root / "log"
        tail = log.read_text()[-6000:] if log.exists() else ""
        return "\n".join([*self.happened, f"the end of {log}:", tail])

    def _note(self, text: str) -> None:
        self.happened.append(text)

    def _kill(
        self, driver: BaseProcess, started: float, kills: tuple[tuple[float, str], ...]
    ) -> None:
        draw = random.Random(str(kills))
        for seconds, kind in kills:
            driver.join(max(0.0, started + seconds - time.monotonic()))
            if driver.exitcode is not None:
                return
            victims = [driver.pid] if kind == "driver" else self._victims(kind, driver)
            if not victims:
                self._note(f"after {seconds} s: no {kind}")
                continue
            pid = draw.choice(sorted(victims))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._note(f"after {seconds} s: killed {kind} {pid}")

    def _victims(self, kind: str, driver: BaseProcess) -> list[int]:
        """Living processes of a kind: of the session's own head, or the driver's own children."""
        titles = {"worker": "ray::HostActor", "keeper": "ray::Keeper", "idle": "ray::IDLE"}
        parent = self.raylet or psutil.Process(driver.pid)
        found = []
        for child in parent.children():
            with contextlib.suppress(psutil.Error):
                title = " ".join(child.cmdline())
                if self.raylet is None or title.startswith(titles[kind]):
                    found.append(child.pid)
        return found


@contextlib.contextmanager
def fork_server() -> Iterator[Any]:
    """A fork server that has imported all that a run needs, which makes a driver start at once."""
    here = Path(__file__).parent
    before = os.environ.get("PYTHONPATH")
    # Before Python 3.13, a fork server does not get its parent's sys.path.
    paths = [str(here), str(here.parent), str(here.parents[1]), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos_driver"])
    server = multiprocessing.forkserver._forkserver
    server.ensure_running()
    try:
        yield context
    finally:
        server._stop()
        context.set_forkserver_preload(["__main__"])
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[], None]]:
    """A file system of a few KB at a folder, and what gives it room."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)

    def grow() -> None:
        subprocess.run(["mount", "-o", f"remount,size={ROOMY}", str(folder)], check=True)

    try:
        yield grow
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether a test may mount a small file system: as root, in most containers not."""
    if os.geteuid() != 0:
        return False
    try:
        with small_disk(folder, TINY):
            return True
    except subprocess.CalledProcessError:
        return False
