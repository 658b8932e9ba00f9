"""Two runs at once of one partition on one Ray cluster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support import pool_models
from support.data import write_source
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.events import Event
from vane_dagster.orchestration.run import RunContext, run_pipeline

ROWS = 200
warm = pool_models.ray_compute


def noted(folder: Path) -> list[int]:
    return sorted(pool_models.noted(folder / "calls"))


class Driver:
    """A run of its own thread, with its own claims and leases."""

    def __init__(self, tmp_path: Path, compute: Any, name: str) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        source = vd.parquet(str(tmp_path / "src"))
        pipeline = vd.Pipeline("docs", source=source, id="id", fragment_rows=10)
        clean = pipeline.project("clean", ["id"])
        out = pool_models.add(clean, "out", tmp_path, sleep=0.1, batch_size=10, concurrency=2)
        out.write("sink", str(tmp_path / "sink"))
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


@pytest.fixture
def ray_compute(warm: vd.RayCompute, tmp_path: Path) -> vd.RayCompute:
    """The cluster, without models' pools; a source of 20 fragments."""
    write_source(tmp_path / "src", {"id": range(ROWS)})
    return warm


def manifests(tmp_path: Path, stage: str) -> list[str]:
    folder = tmp_path / "store" / "docs" / stage / "manifests"
    return [path.name for path in folder.rglob("*.json")]


def outs(tmp_path: Path) -> list[int]:
    return pool_models.rows(tmp_path, "out")["out"].to_pylist()
