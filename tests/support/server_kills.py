"""Runs over a server of a pipeline whose processes are killed at random times.

A round is a run of two stages, an asynchronous `prompt` and a synchronous `map_batches`, over a
server of its own; it is run again if its driver was killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from support.paths import TESTS
from support.server_runs import SCHEMA, ask, echo

ROWS = 300
KINDS = (
    "server", "child", "guard", "replica's worker", "client worker", "driver",
    "pool manager",
)  # fmt: skip
_PAUSE_SECONDS = (0.3, 2.0)
_MAX_ROUND_SECONDS = 180.0


def declared(folder: Path, replicas: int) -> vd.Pipeline:
    """The pipeline of a round, with a server that notes its requests in the round's folder."""
    options = ("--requests", f"{folder}/requests", "--leak-children", "1", "--seconds", "0.03")
    llm = echo("echo", *options, replicas=replicas, version="1")
    pipeline = vd.Pipeline("killed", source=vd.parquet(str(folder / "src")), id="id")
    shared: dict[str, Any] = {"on_error": "quarantine", "batch_size": 8}
    workers = vd.Workers(max_concurrency=2)
    pipeline.prompt(
        "answered", "row {id}", output_column="answer", concurrency=workers, model=llm,
        **grouped(shared),
    )  # fmt: skip
    pipeline.map_batches(
        "asked", ask, fn_kwargs={"llm": llm}, schema=SCHEMA, concurrency=2, **grouped(shared)
    )
    return pipeline


def run(folder: Path, replicas: int, compute: str) -> bool:
    """Materialize the pipeline of a round, as the process that is called the driver."""
    cluster = vd.LocalCluster(num_cpus=2, idle_minutes=5)
    chosen = vd.LocalCompute() if compute == "local" else vd.RayCompute(cluster=cluster)
    done = dg.materialize(
        [declared(folder, replicas).build_assets()],
        resources={"compute": chosen, "store": vd.FragmentStore(root=str(folder / "store"))},
        raise_on_error=False,
    )
    return done.success


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def servers(folder: Path) -> list[psutil.Process]:
    """The own processes of a round's server."""
    found = [(each, _words(each)) for each in psutil.process_iter()]
    return [
        each
        for each, words in found
        if f"{folder}/requests" in words and "guard.py" not in " ".join(words)
    ]


def living(kind: str, folder: Path, driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The living processes of a kind, found by what they are."""
    own = servers(folder)
    parents = [found for each in own if (found := each.parent())]
    guards = [each for each in parents if "servers/guard.py" in " ".join(_words(each))]
    holders = {int(words[4]) for each in guards if (words := _words(each))}
    if kind == "child":
        return [child for each in own for child in each.children(recursive=True)]
    if kind == "driver":
        return [psutil.Process(driver.pid)] if driver.poll() is None else []
    if kind in ("server", "guard"):
        return own if kind == "server" else guards
    home, found = os.environ["VANE_DAGSTER_HOME"], []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title = " ".join(each.cmdline())
            of_ray = title.startswith(("ray::PoolManager", "ray::HostActor"))
            if of_ray and each.environ().get("VANE_DAGSTER_HOME") != home:
                continue
            is_worker = "ray::HostActor" in title
            is_worker |= "local_worker" in title and each.ppid() == driver.pid
            is_kind = {
                "pool manager": title.startswith("ray::PoolManager"),
                "replica's worker": each.pid in holders,
                "client worker": is_worker and each.pid not in holders,
            }
            found += [each] if is_kind[kind] else []
    return found


@dataclass
class Round:
    """What came of a round.

    Attributes:
        killed: What was killed, in order.
        lost: Rows without a result, of both stages.
        twice: Rows with two results.
        wrong: Rows with another row's answer.
        quarantined: Rows in quarantine.
        left: Processes of the server after its cluster or driver is gone.
        runs: Runs that it took.
        failures: Ends of runs other than by a kill.
    """

    killed: list[str] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    quarantined: int = 0
    left: int = 0
    runs: int = 0
    failures: list[str] = field(default_factory=list)


def campaign_round(
    chance: random.Random, kills: int, compute: str, kinds: tuple[str, ...] = KINDS
) -> Round:
    """Run a round, and kill processes while it runs."""
    folder, result = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp")), Round()
    deadline = time.monotonic() + _MAX_ROUND_SECONDS
    try:
        write_source(folder / "src", {"id": range(ROWS)})
        replicas = chance.choice([1, 2])
        is_done = False
        while not is_done and result.runs < 6 and time.monotonic() < deadline:
            is_done = _run_once(folder, replicas, compute, chance, kills, kinds, result)
        _check_rows(declared(folder, replicas), str(folder / "store"), result)
        if compute == "ray":  # that of a run without a cluster ends with it
            command = [sys.executable, "-m", "vane_dagster", "pools", "evict", "echo", "--force"]
            subprocess.run(command, check=False, capture_output=True)
        gone = time.monotonic() + 40
        while (left := servers(folder)) and time.monotonic() < gone:
            time.sleep(0.2)
        result.left = len(left)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _run_once(
    folder: Path,
    replicas: int,
    compute: str,
    chance: random.Random,
    kills: int,
    kinds: tuple[str, ...],
    result: Round,
) -> bool:
    """Run the pipeline once; return whether it succeeded."""
    result.runs += 1
    log = folder / f"log-{result.runs}"
    command = [sys.executable, "-m", "support.server_kills", str(folder), str(replicas), compute]
    with log.open("wb") as output:
        driver = subprocess.Popen(command, cwd=TESTS, stdout=output, stderr=output)
    was_killed = False
    while driver.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(chance.uniform(*_PAUSE_SECONDS))
        if len(result.killed) < kills and (folder / "requests").exists():
            kind = chance.choice(kinds)
            if victims := living(kind, folder, driver):
                with contextlib.suppress(psutil.Error):
                    chance.choice(victims).kill()
                    result.killed.append(kind)
                    was_killed |= kind == "driver"
    if driver.returncode and not was_killed:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "stage '" in line]
        result.failures.append((errors or lines or ["no output"])[-1][-300:])
    return driver.returncode == 0


def _check_rows(pipeline: vd.Pipeline, store: str, result: Round) -> None:
    for stage in ("answered", "asked"):
        try:
            rows = vd.load(pipeline[stage], store=store).to_pylist()
            result.quarantined += vd.quarantine(pipeline[stage], store=store).num_rows
        except vd.errors.VaneError as error:
            result.failures.append(str(error)[:300])
            result.lost += ROWS
            continue
        ids = {row["id"] for row in rows}
        result.lost += ROWS - len(ids)
        result.twice += len(rows) - len(ids)
        result.wrong += sum(row["answer"] != f"echo: row {row['id']}" for row in rows)


if __name__ == "__main__":
    sys.exit(not run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
