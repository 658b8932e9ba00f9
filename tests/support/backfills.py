"""Pipelines in a real dagster dev, and their state as users see it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support import forked
from support.dagster_dev import DagsterDev
from support.damage import stored_parts
from support.data import write_source
from support.paths import REPOSITORY

# Workers import this module, and need no Dagster for it.
FUNCTIONS = '''
import os
import time


def doubled(batch):
    """Fails at 666. The pipelines that use it share a worker."""
    values = batch["n"].to_pylist()
    if 666 in values:
        raise ValueError("a poisoned row")
    return {"double": [2 * n for n in values]}


class Noting:
    """Notes each batch by the source value of its first row; takes its time while it is told to."""

    def __init__(self, notes):
        self.notes = notes

    def __call__(self, batch):
        began = time.time()
        with open(os.path.join(self.notes, "calls"), "a") as calls:
            calls.write(f"{batch['n'][0]}\\n")
        if os.path.exists(os.path.join(self.notes, "slowly")):
            time.sleep(0.25)
        times = {"began": began, "ended": time.time(), "pid": os.getpid()}
        return {name: [value] * batch.num_rows for name, value in times.items()}
'''

DEFINITIONS = '''
"""Pipelines over what the tests write beside this file."""

from pathlib import Path

import dagster as dg
from functions import Noting, doubled

import vane_dagster as vd

ROOT = Path(__file__).parent
NOTES = str(ROOT / "notes")


def pipeline(name, partitions, **options):
    source = vd.parquet(f"{ROOT}/src/{name}/{{partition_key}}")
    return vd.Pipeline(
        name, source=source, id="id", partitions_def=partitions, fragment_rows=10, **options
    )


def doubling(stage):
    return stage.map_batches(
        "doubles", doubled, schema={"double": "BIGINT"}, columns=["n"], concurrency=1
    )


def noting(made):
    stage = made.map_batches(
        "noted", Noting, schema={"began": "DOUBLE", "ended": "DOUBLE", "pid": "BIGINT"},
        batch_size=5, concurrency=2, fn_constructor_kwargs={"notes": NOTES},
        reuse=vd.Reuse(version="1"),
    )
    stage.project("kept", ["pid"])
    return made


days = pipeline("days", dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-11"))
doubling(days).project("kept", ["double"])

slow = noting(pipeline("slow", dg.StaticPartitionsDefinition(["stopped"])))

shown = pipeline("shown", dg.StaticPartitionsDefinition(["monday"]))
doubling(shown.project("clean", {"n": "abs(n)"}))

defs = dg.Definitions(
    assets=[made.build_assets() for made in (days, slow, shown)]
    + [made.build_source() for made in (days, shown)],
    resources={
        "compute": vd.RayCompute(cluster=vd.LocalCluster(name="backfills", num_cpus=2)),
        "store": vd.FragmentStore(root=str(ROOT / "store")),
    },
)
'''
SLOW = ["slow/noted", "slow/kept"]


class Project(DagsterDev):
    def __init__(self, folder: Path, workspace: Path | None) -> None:
        super().__init__(folder, workspace)
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "definitions.py").write_text(DEFINITIONS)
        (folder / "notes").mkdir()
        self.store = vd.FragmentStore(root=str(folder / "store"))

    def write(self, pipeline: str, partition: str, values: list[int]) -> None:
        table = {"id": list(range(len(values))), "n": values}
        write_source(self.folder / "src" / pipeline / partition, table)

    def rows(self, stage: str, partition: str) -> dict[str, list[Any]]:
        return vd.load(stage, partition, store=self.store).to_pydict()

    def parts(self, stage: str, partition: str) -> int:
        """Count the finished parts of a stage in a partition, including those in no manifest."""
        pipeline, _, name = stage.partition("/")
        folder = self.folder / "store" / pipeline / name / "parts" / partition
        return len(stored_parts(folder))

    def calls(self, values: list[int]) -> Counter[int]:
        """Count the computations of some batches, by their first value."""
        noted = map(int, (self.folder / "notes" / "calls").read_text().split())
        return Counter(value for value in noted if value in set(values))

    def slowly(self, slow: bool) -> None:
        flag = self.folder / "notes" / "slowly"
        flag.touch() if slow else flag.unlink(missing_ok=True)

    def pools(self) -> list[dict[str, Any]]:
        shown = ["pools", "--json", "--name", "backfills"]
        program = f"from vane_dagster.cli.main import main; main({shown})"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        done = forked.run(["-c", program], clean, self.folder, 60)
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def dev(_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project with its own Ray head, and the demo."""
    from vane_dagster.compute.local_head import LocalHead

    project = Project(tmp_path_factory.mktemp("project"), REPOSITORY / "workspace.yaml")
    try:
        project.start()
        yield project
    finally:
        project.stop()
        LocalHead(name="backfills").stop()
