"""Runs over a server of a pipeline whose processes are killed at random times.

A round is a run of two stages, an asynchronous `prompt` and a synchronous `map_batches`, over a
server of its own; it is run again if its driver was killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import psutil

import vane_dagster as vd
from support.arguments import grouped
from support.forked import Forked
from support.results import materializing
from support.server_processes import is_guard
from support.server_runs import SCHEMA, ask, echo

ROWS = 300
KINDS = (
    "server", "child", "guard", "replica's worker", "client worker", "driver",
    "pool manager",
)  # fmt: skip


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
    return materializing(folder)(declared(folder, replicas), chosen, raises=False).success


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def servers(folder: Path) -> list[psutil.Process]:
    """The own processes of a round's server."""
    found = [(each, _words(each)) for each in psutil.process_iter()]
    return [each for each, words in found if f"{folder}/requests" in words and not is_guard(words)]


def living(kind: str, folder: Path, driver: Forked) -> list[psutil.Process]:
    """The living processes of a kind, found by what they are."""
    own = servers(folder)
    parents = [found for each in own if (found := each.parent())]
    guards = [each for each in parents if is_guard(_words(each))]
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


if __name__ == "__main__":
    sys.exit(not run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
