"""Processes killed at random times, and then one run that puts all of it right.

Storage that fails, rows that fail and kills between two operations are in `test_simulation.py`.

``VANE_CHAOS_ROUNDS=500`` makes more rounds, ``VANE_CHAOS_SEED=17 VANE_CHAOS_ROUNDS=1`` repeats one;
the kills of a round come at the same moments then, while the processes run at their own speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import chaos_run, forked
from support.chaos_run import FRAGMENT_ROWS, KEYED, KEYS, RAN, STAGES
from support.data import read_stage, write_source
from support.paths import REPOSITORY, TESTS
from support.pools_process import CLUSTER
from vane_dagster.compute.local_head import LocalHead
from vane_dagster.compute.processes import marked
from vane_dagster.errors import VaneError
from vane_dagster.storage.filesystem import TEMPORARY, StoragePath
from vane_dagster.storage.gc import GcPolicy, collect
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.store import Store

_START_SECONDS, _WORK_SECONDS = 1.5, 2.5
_LOOKS_SECONDS = 0.02
_MAX_SECONDS = 150.0
_MAX_LAST_RUNS = 4
_NO_HEARTBEAT = "the pool manager received no heartbeat from this run"
_TITLES = {"worker": "ray::HostActor", "pool_manager": "ray::PoolManager", "idle": "ray::IDLE"}


class Kill(NamedTuple):
    """A process that is killed.

    Attributes:
        at_work: Whether the clock starts with the first file that the run writes, or with the run.
        seconds: Seconds until the kill.
        kind: "driver", "worker", "pool_manager" or "idle".
    """

    at_work: bool
    seconds: float
    kind: str


class Disturbed(NamedTuple):
    """A disturbed run; `partition` is None for all."""

    partition: str | None
    kills: tuple[Kill, ...]


def drawn(seed: int, kinds: tuple[str, ...]) -> list[Disturbed]:
    """Draw the runs of a round."""
    draw = random.Random(seed)
    runs = []
    for _ in range(2 if draw.random() < 0.25 else 1):
        partition = draw.choice((None, None, *chaos_run.KEYS))
        killed = [draw.choice(kinds) for _ in range(draw.randint(0, 4))]
        if draw.random() < 0.4 or not killed:
            killed.append("driver")
        runs.append(Disturbed(partition, tuple(sorted(_kill(draw, kind) for kind in killed))))
    return runs


def _kill(draw: random.Random, kind: str) -> Kill:
    at_work = draw.random() < 0.8
    most = _WORK_SECONDS if at_work else _START_SECONDS
    return Kill(at_work, round(draw.uniform(0.0, most), 2), kind)


@dataclass
class Place:
    """The environment of a round's runs.

    Attributes:
        source: The source's folder.
        cluster: The local cluster's settings; None for subprocesses.
        raylet: The cluster's raylet.
        happened: Log lines of the round.
    """

    source: Path
    cluster: dict[str, Any] | None
    raylet: psutil.Process | None
    happened: list[str] = field(default_factory=list)

    def run(self, root: Path, run: Disturbed) -> int:
        """Execute one run to its end, successful or not, and return the driver's exit status."""
        options = {
            "root": str(root),
            "source": str(self.source),
            "cluster": self.cluster,
            "partition": run.partition,
        }
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        env["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(REPOSITORY)])
        started, before = time.monotonic(), _files(root)
        program = [chaos_run.__file__, json.dumps(options)]
        with open(root / "log", "a") as out, open(root / "log", "a") as err:
            output = {out.fileno(): 1, err.fileno(): 2}
            driver = forked.server(forked.DRIVER).start(program, env, output)
        self._kill(driver, run.kills, lambda: _files(root) != before)
        ended = _has_ended(driver, max(1.0, started + _MAX_SECONDS - time.monotonic()))
        driver.kill()
        status = driver.wait()
        seconds = time.monotonic() - started
        self.happened.append(f"run ended with {status} after {seconds:.1f} s")
        if status == chaos_run.FAILED:
            failure = (root / "log").read_text().rpartition(chaos_run.FAILURE)[2]
            self.happened.append(" ".join(failure.split())[:300])
        assert ended, f"the run did not end within {_MAX_SECONDS:g} s\n{self.summary(root)}"
        return status

    def finish(self, root: Path) -> None:
        """Execute the final run; repeat it if a busy machine missed heartbeats."""
        for _ in range(_MAX_LAST_RUNS):
            status = self.run(root, Disturbed(None, ()))
            if status == chaos_run.RAN:
                return
            if _NO_HEARTBEAT not in self.happened[-1]:
                break
        raise AssertionError(f"the last run ended with {status}")

    def summary(self, root: Path) -> str:
        lines = (root / "log").read_text().splitlines()
        shown = [line for line in lines if " - DEBUG - " not in line][-60:]
        return "\n".join([*self.happened, "the end of the log:", *shown])

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
            victims = [driver.pid] if kill.kind == "driver" else self._living(kill.kind, driver)
            pid = draw.choice(sorted(victims)) if victims else None
            self.happened.append(f"{kill}: {pid}")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _living(self, kind: str, driver: forked.Forked) -> list[int]:
        """Return living processes of a kind: of the session's head, or the driver's children."""
        parent = self.raylet or psutil.Process(driver.pid)
        found = []
        for child in parent.children():
            with contextlib.suppress(psutil.Error):
                title = " ".join(child.cmdline())
                if self.raylet is None or title.startswith(_TITLES[kind]):
                    found.append(child.pid)
        return found


def _has_ended(driver: forked.Forked, seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        driver.wait(seconds)
    return driver.poll() is not None


def _files(root: Path) -> int:
    return sum(len(files) for place in ("store", "out") for _, _, files in os.walk(root / place))


ROUNDS = int(os.environ.get("VANE_CHAOS_ROUNDS", "5"))
SEED = int(os.environ.get("VANE_CHAOS_SEED", "1"))
FILES, FILE_ROWS = 2, 150
IDS = {
    key: range(1000 * n, 1000 * n + FILES * FILE_ROWS) for n, key in enumerate(KEYS, start=1)
}  # fmt: skip
Rows = dict[str, dict[int, dict[str, Any]]]
"""Published rows by partition and id."""

on_ray = [("ray", SEED + n) for n in range(ROUNDS)]
on_subprocesses = [("local", SEED + n) for n in range(max(1, ROUNDS // 3))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two partitions of two files, three fragments each."""
    folder = tmp_path_factory.mktemp("chaos") / "src"
    for key, ids in IDS.items():
        for file in range(FILES):
            own = list(ids[file * FILE_ROWS : (file + 1) * FILE_ROWS])
            rows = {"id": own, "n": [7 * i % 101 for i in own], "text": [f"t{i * i}" for i in own]}
            write_source(folder / key, rows, f"{file}.parquet", row_group_size=FRAGMENT_ROWS)
    return folder


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The rows that the pipeline publishes where nothing happens."""
    root = tmp_path_factory.mktemp("undisturbed")
    place = Place(source, None, None)
    assert place.run(root, Disturbed(None, ())) == RAN, place.summary(root)
    rows = {
        key: {row["id"]: row for row in table.to_pylist()} for key, table in published(root).items()
    }
    assert {key: list(found) for key, found in rows.items()} == {k: list(v) for k, v in IDS.items()}
    return rows


def published(root: Path) -> dict[str, pa.Table]:
    found = {}
    for key in KEYS:
        files = sorted((root / "out" / key).glob("*.parquet"))
        assert files, f"nothing is published of {key}"
        found[key] = pa.concat_tables([pq.read_table(file) for file in files]).sort_by("id")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("compute", "seed"), [*on_ray, *on_subprocesses])
def test_one_run_puts_right_whatever_has_happened(
    compute, seed, source, undisturbed, tmp_path, request
):
    place = Place(source, None, None)
    kinds = ("worker",)
    if compute == "ray":
        request.getfixturevalue("cluster").connect()
        processes = {name: pid for pid, name in marked(LocalHead(**CLUSTER).mark).items()}
        place = Place(source, CLUSTER, psutil.Process(processes["raylet"]))
        kinds = ("worker",) * 5 + ("pool_manager", "idle")
    runs = drawn(seed, kinds)
    try:
        for run in runs:
            place.run(tmp_path, run)
            check_in_force(tmp_path)
        place.finish(tmp_path)
        check(tmp_path, undisturbed)
    except (AssertionError, VaneError) as error:
        raise AssertionError(f"{error}\n{runs}\n{place.summary(tmp_path)}") from error
    shutil.rmtree(tmp_path)


def in_force(root: Path) -> Iterator[tuple[str, Path, Manifest | None]]:
    """Each stage and partition: its name, the folder of its files and its manifest."""
    store = Store(StoragePath(str(root / "store")))
    for stage in STAGES:
        for key in KEYS:
            folder = Path(store.parts("chaos", stage, key).path)
            folder = root / "out" / key if stage == "published" else folder
            yield f"{stage} of {key}", folder, store.in_force("chaos", stage, key)


def check_in_force(root: Path) -> None:
    """What holds at any moment: all files that a manifest in force names are there."""
    for name, folder, manifest in in_force(root):
        if manifest is not None:
            lost = {part.name for part in manifest.parts} - {file.name for file in folder.glob("*")}
            assert not lost, f"{name} lacks {lost}"


def check(root: Path, undisturbed: Rows) -> None:
    """What holds after the last run, whatever came before it."""
    store = Store(StoragePath(str(root / "store")))
    check_rows(root, undisturbed)
    check_files(root)
    for _ in range(2):
        list(collect(store, GcPolicy(time.time() + 60, keep=0, grace=-60)))
    check_files(root, collected=True)
    check_rows(root, undisturbed)


def check_rows(root: Path, undisturbed: Rows) -> None:
    for key, table in published(root).items():
        assert table.to_pylist() == [*undisturbed[key].values()], f"{key}: other rows"
        assert read_stage(root / "store", "chaos", "joined", key).num_rows == len(table)


def check_files(root: Path, collected: bool = False) -> None:
    """Every manifest's files are there, and what nobody names is garbage in its proper place."""
    for place, folder, manifest in in_force(root):
        assert manifest is not None, f"{place} has no manifest"
        is_published = folder.is_relative_to(root / "out")
        assert all(part.rows_in for part in manifest.parts)
        names = {part.name for part in manifest.parts}
        assert not is_published or set(manifest.published_files) == names
        names |= {part.faults for part in manifest.parts if part.faults}
        names |= {part.row_records for part in manifest.parts if part.row_records}
        is_keyed = place.partition(" ")[0] in KEYED
        assert all(part.row_records for part in manifest.parts) == is_keyed
        there = {file.name for file in folder.glob("*") if file.is_file()}
        assert names <= there, f"{place} lacks {names - there}"
        if collected or is_published:
            assert there == names, f"{place} has {there - names} besides"
    for key in KEYS:
        below = {path.name for path in (root / "out" / key).iterdir() if path.is_dir()}
        assert below <= {STAGING}, f"{key}: {below} in the target"
    assert {path.name for path in (root / "out").iterdir()} == set(KEYS)
    announced = list((root / "store").rglob("publishing-*"))
    assert not announced, f"{announced} are left"
    if collected:
        left = list((root / "out").rglob(f"{STAGING}/*"))
        left += (root / "store").rglob(f"{TEMPORARY}*")
        assert not left, f"{left} are left"
