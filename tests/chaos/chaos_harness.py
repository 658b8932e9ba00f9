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
_START_SECONDS, _WORK_SECONDS = 1.5, 2.5
_LOOKS_SECONDS = 0.02
_MOST_LAST_RUNS = 4
_NO_HEARTBEAT = "the keeper had no heartbeat of this run"
_FORWARDED = ("VANE_DAGSTER_HOME", "DAGSTER_DISABLE_TELEMETRY")
_TINY_KB = (40, 110)
_ROOMY = "32m"


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


@dataclass(frozen=True, order=True)
class Kill:
    """A process that is killed.

    Attributes:
        at_work: Whether the clock starts with the first file that the run writes, or with the run.
        seconds: When.
        kind: "driver", "worker", "keeper" or "idle".
    """

    at_work: bool
    seconds: float
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} {self.seconds} s into the {'work' if self.at_work else 'run'}"


@dataclass(frozen=True)
class Disturbed:
    """A run that is disturbed; `partition` is None for all."""

    partition: str | None
    faults: tuple[testing.Fault, ...]
    kills: tuple[Kill, ...]


@dataclass(frozen=True)
class Plan:
    """What one round does.

    Attributes:
        seed: What all of it was drawn from.
        labels: What becomes of rows that cannot be labelled.
        poison: Rows at fault, in the last run too.
        former: Whether other rows were published before.
        runs: The disturbed runs.
        tiny: Size in KB of a disk for the store that is too small for the disturbed runs; 0 for
            one that has room.
    """

    seed: int
    labels: str
    poison: Poison
    former: bool
    runs: tuple[Disturbed, ...]
    tiny: int

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: labels={self.labels}, former={self.former}, tiny={self.tiny}",
            *(f"  poison: {fault}" for fault in self.poison.faults()),
        ]
        for run in self.runs:
            lines.append(f"  run of {run.partition or 'all'}:")
            lines += [f"    kill {kill}" for kill in run.kills]
            lines += [f"    {fault}" for fault in run.faults]
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
    if draw.random() < 0.08:  # a search for it starts a dozen workers
        killing[draw.choice(("scores", "labels"))] = (poisoned[6],)
    tiny = draw.randint(*_TINY_KB) if mounts and draw.random() < 0.12 else 0
    runs = []
    for number in range(2 if draw.random() < 0.25 else 1):
        partition = draw.choice((None, None, *KEYS))
        partitions = 1 if partition else len(KEYS)
        faults = [draw.choice(_FAULTS)(draw, partitions) for _ in range(draw.randint(0, 2))]
        killed = [draw.choice(kinds) for _ in range(draw.randint(0, 4))]
        if draw.random() < 0.4 or not (faults or killed or tiny or number):
            killed.append("driver")
        kills = sorted(_kill(draw, kind) for kind in killed)
        runs.append(Disturbed(partition, tuple(faults), tuple(kills)))
    return Plan(
        seed,
        draw.choice(("quarantine", "null")),
        Poison({s: ids for s, ids in raising.items() if ids}, killing),
        not tiny and draw.random() < 0.25,
        tuple(runs),
        tiny,
    )


def _kill(draw: random.Random, kind: str) -> Kill:
    at_work = draw.random() < 0.8
    most = _WORK_SECONDS if at_work else _START_SECONDS
    return Kill(at_work, round(draw.uniform(0.0, most), 2), kind)


def _some(draw: random.Random, most: int) -> list[int]:
    return sorted(draw.sample(range(1, most), draw.randint(1, 3)))


def _models(draw: random.Random) -> str:
    return draw.choice(("scores", "labels"))


# Each is given the number of partitions, by which it is drawn when it happens. No memory runs out,
# as a warm worker remembers the batch size that fits: after some rounds single rows would fail.
_FAULTS: tuple[Callable[[random.Random, int], testing.Fault], ...] = (
    lambda draw, n: testing.StorageFault(
        "*", "disconnect", draw.choice(("write", "read", "list")), calls=_some(draw, 30 * n)
    ),
    lambda draw, n: testing.StorageFault(
        draw.choice(("*/store/*", "*/out/*", "*/joined/parts/*")), calls=draw.randint(1, 6 * n)
    ),
    lambda draw, n: testing.StorageFault("*/manifests/*", "kill", calls=draw.randint(1, 6 * n)),
    lambda draw, n: testing.StorageFault("*/out/*", "kill", calls=draw.randint(1, 12 * n)),
    lambda draw, n: testing.StorageFault("*/parts/*", "kill", calls=draw.randint(1, 24 * n)),
    lambda draw, n: testing.StorageFault("*", "kill", "delete", calls=draw.randint(1, 3)),
    lambda draw, n: testing.StorageFault("*", "denied", "delete", calls=draw.randint(1, 3)),
    lambda draw, n: testing.StorageFault("*", "denied", "list", calls=draw.randint(1, 30)),
    lambda draw, n: testing.CallFault(_models(draw), "disconnect", calls=_some(draw, 20 * n)),
    lambda draw, n: testing.CallFault(_models(draw), "kill", calls=draw.randint(1, 20 * n)),
    lambda draw, n: testing.LoadFault(draw.choice(("Scorer", "Labeller")), "kill", calls=1),
)


@dataclass
class Place:
    """Where a round's runs are done.

    Attributes:
        context: The fork server.
        source: The source's folder.
        cluster: The local cluster's settings; None for subprocesses.
        raylet: The cluster's raylet.
        blocks: The faults of the round's runs.
        happened: What has happened, in lines.
    """

    context: Any
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
        """Does one run to its end, whatever that is, and gives the driver's exit status."""
        options = {
            "root": str(root),
            "source": str(self.source),
            "labels": labels,
            "cluster": self.cluster,
            "partition": partition,
            "former": former,
        }
        injected = self.blocks.enter_context(testing.faults(*faults))
        # What a killed run has queued is done later: it has to meet the same faults, so that the
        # block ends with the round, and is put aside until then.
        env = {VARIABLE: os.environ.pop(VARIABLE)}
        env |= {name: os.environ[name] for name in _FORWARDED if name in os.environ}
        started, before = time.monotonic(), _files(root)
        driver = self.context.Process(
            target=chaos_driver.run, args=(options, env, str(root / "log"))
        )
        driver.start()
        self._kill(driver, kills, lambda: _files(root) != before)
        driver.join(max(1.0, started + MOST_SECONDS - time.monotonic()))
        ended = driver.exitcode is not None
        if not ended:
            driver.kill()
            driver.join()
        seconds = time.monotonic() - started
        self._note(
            f"run ended with {driver.exitcode} after {seconds:.1f} s; fired: {injected.fired}"
        )
        if driver.exitcode == chaos_driver.FAILED:
            told = (root / "log").read_text().rpartition(chaos_driver.FAILURE)[2].strip()
            self._note("  " + " ".join(told.split())[:300])
        assert ended, f"the run did not end within {MOST_SECONDS:g} s\n{self.told(root)}"
        return driver.exitcode

    def finish(self, root: Path, labels: str, faults: list[testing.Fault]) -> None:
        """The run that puts all right; once more where the machine was too busy for heartbeats."""
        for _ in range(_MOST_LAST_RUNS):
            status = self.run(root, labels, faults)
            if status == chaos_driver.RAN:
                return
            if _NO_HEARTBEAT not in self.happened[-1]:
                break
        raise AssertionError(f"the last run ended with {status}")

    def told(self, root: Path) -> str:
        """What has happened in a round, for a message."""
        log = root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        shown = [line for line in lines if " - DEBUG - " not in line][-60:]
        return "\n".join([*self.happened, f"the end of {log}:", *shown])

    def _note(self, text: str) -> None:
        self.happened.append(text)

    def _kill(
        self, driver: BaseProcess, kills: tuple[Kill, ...], is_working: Callable[[], bool]
    ) -> None:
        draw = random.Random(str(kills))
        started, working = time.monotonic(), False
        for kill in kills:
            if kill.at_work and not working:
                while driver.exitcode is None and not is_working():
                    driver.join(_LOOKS_SECONDS)
                started, working = time.monotonic(), True
            driver.join(max(0.0, started + kill.seconds - time.monotonic()))
            if driver.exitcode is not None:
                return
            victims = [driver.pid] if kill.kind == "driver" else self._victims(kill.kind, driver)
            if not victims:
                self._note(f"{kill}: there is none")
                continue
            pid = draw.choice(sorted(victims))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._note(f"{kill}: killed {pid}")

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


def _files(root: Path) -> int:
    """How many files there are of a round but for its log."""
    return sum(len(files) for place in ("store", "out") for _, _, files in os.walk(root / place))


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
def small_disk(folder: Path, kb: int) -> Iterator[Callable[[], None]]:
    """A file system of a few KB at a folder, and what gives it room."""
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
    """Whether a test may mount a small file system: as root, in most containers not."""
    if os.geteuid() != 0:
        return False
    try:
        with small_disk(folder, _TINY_KB[0]):
            return True
    except subprocess.CalledProcessError:
        return False
