"""Models that note who loads them, in pipelines on warm pools."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from vane_dagster.compute.client import pool_managers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the test modules

SCHEMA = {"id": "BIGINT", "out": "BIGINT", "pid": "BIGINT"}


class Model:
    def __init__(self, log: str, factor: int = 2, sleep: float = 0.0, needs: str = "") -> None:
        self.log, self.factor, self.sleep = Path(log), factor, sleep
        if needs and not os.path.exists(needs):
            raise RuntimeError(f"no weights at {needs}")
        note(self.log / "loads", os.getpid())

    def __call__(self, batch):
        ids = batch["id"].to_pylist()
        note(self.log / "calls", *ids)
        time.sleep(self.sleep)
        return {"id": ids, "out": [self.factor * n for n in ids], "pid": [os.getpid()] * len(ids)}


def note(file: Path, *values: int) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    with open(file, "a") as opened:
        opened.write("".join(f"{value}\n" for value in values))


def noted(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def docs(tmp_path: Path, rows: int = 60) -> vd.Pipeline:
    write_source(tmp_path / "src", {"id": range(rows)})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def add(above: Any, name: str, tmp_path: Path, model: type = Model, **settings: Any) -> vd.Stage:
    own = {k: settings.pop(k) for k in ("factor", "sleep", "needs") if k in settings}
    given = {"batch_size": 5, "concurrency": 1, **settings}
    kwargs = {"log": str(tmp_path), **own}
    return above.map_batches(
        name, model, schema=SCHEMA, fn_constructor_kwargs=kwargs, **grouped(given)
    )


def rows(tmp_path: Path, stage: str, partition: str | None = None) -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage, partition).sort_by("id")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(true: Callable[[], Any], what: str, seconds: float = 40.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"not after {seconds:g} s: {what}"
        time.sleep(0.05)
    return found


def listed() -> list[dict[str, Any]]:
    """The models' pools of the cluster that this process is connected to."""
    import ray

    answers = [
        ray.get(pool_manager.pools.remote(), timeout=30)
        for pool_manager in pool_managers().values()
    ]
    return [pool for answer in answers for pool in answer if pool["identity"] != "io"]


def clear() -> None:
    import ray

    for pool_manager in pool_managers().values():
        for pool in ray.get(pool_manager.pools.remote(), timeout=30):
            if pool["identity"] != "io":
                ray.get(pool_manager.evict.remote(pool["identity"], True), timeout=30)


@pytest.fixture
def ray_compute(cluster: vd.LocalCluster) -> Iterator[vd.RayCompute]:
    """The session's cluster, connected, and without models' pools before and after."""
    cluster.connect()
    clear()
    yield vd.RayCompute(cluster=cluster)
    cluster.connect()
    clear()


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Does something beside a run, and raises what it raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    yield
    thread.join()
    if raised:
        raise raised[0]
