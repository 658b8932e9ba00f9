"""Two runs at once of one partition on one Ray cluster."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.warm_pools import clear
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.events import Event
from vane_dagster.orchestration.run import RunContext, run_pipeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the test modules

ROWS = 200


class Model:
    """Notes the ids that it is given; fails once at the id 70 where it finds the file `fails`.

    Its workers serve all tests, as nothing that a test gives reaches the constructor.
    """

    def __call__(self, batch: pa.Table, log: str, sleep: float) -> dict[str, Any]:
        ids = batch["id"].to_pylist()
        with open(f"{log}/calls", "a") as file:
            file.write("".join(f"{id}\n" for id in ids))
        time.sleep(sleep)
        if 70 in ids and os.path.exists(f"{log}/fails"):
            os.unlink(f"{log}/fails")
            raise ValueError("this happens once")
        return {"id": ids, "out": [2 * id for id in ids]}


def noted(folder: Path) -> list[int]:
    file = folder / "calls"
    return sorted(int(line) for line in file.read_text().splitlines()) if file.exists() else []


class Driver:
    """A run of its own thread, with its own claims and leases."""

    def __init__(self, tmp_path: Path, compute: Any, name: str, sleep: float = 0.1) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        pipeline = docs(tmp_path, sleep)
        store = vd.FragmentStore(root=str(tmp_path / "store")).open()

        def body() -> None:
            try:
                checks = CheckRunner(pipeline, store)
                context = RunContext(store, name, checks, listen=self.events.append)
                run_pipeline(context, pipeline, tuple(pipeline.stages), [None], compute)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def done(self) -> None:
        self.thread.join(100)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def docs(tmp_path: Path, sleep: float) -> vd.Pipeline:
    pipeline = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=10
    )
    clean = pipeline.project("clean", ["id"])
    out = clean.map_batches(
        "out", Model, schema={"id": "BIGINT", "out": "BIGINT"}, batch_size=10, concurrency=2,
        fn_kwargs={"log": str(tmp_path), "sleep": sleep},
    )  # fmt: skip
    out.write("sink", str(tmp_path / "sink"))
    return pipeline


@pytest.fixture(scope="module")
def warm(cluster: vd.LocalCluster) -> Iterator[vd.RayCompute]:
    """The session's cluster, without models' pools afterwards."""
    yield vd.RayCompute(cluster=cluster)
    cluster.connect()
    clear()


@pytest.fixture
def ray_compute(cluster: vd.LocalCluster, warm: vd.RayCompute, tmp_path: Path) -> vd.RayCompute:
    """The cluster, connected; a source of 20 fragments."""
    write_source(tmp_path / "src", {"id": range(ROWS)})
    cluster.connect()
    return warm


def manifests(tmp_path: Path, stage: str) -> list[str]:
    folder = tmp_path / "store" / "docs" / stage / "manifests"
    return [path.name for path in folder.rglob("*.json")]


def outs(tmp_path: Path, partition: str | None = None) -> list[int]:
    rows = read_stage(tmp_path / "store", "docs", "out", partition).sort_by("id")
    return rows["out"].to_pylist()
