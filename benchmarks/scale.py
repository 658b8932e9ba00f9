"""How planning and ranged runs scale with the number of partitions.

``python -m benchmarks.scale`` creates its data in a temporary folder, and prints two tables. The
figures are seconds on this machine, without a comparison to other frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd
from benchmarks.report import machine
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.events import Committed, Event
from vane_dagster.orchestration.run import run_pipeline
from vane_dagster.planning.plan import PartitionPlan, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.store import Store

STAGES = ("clean", "added")
ROWS = 10


class AddOne:
    """A model that costs nothing."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        return {"y": [x + 1 for x in batch["x"].to_pylist()]}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=10_000, help="to plan")
    parser.add_argument("--files", type=int, default=10, help="in each partition to plan")
    parser.add_argument("--run", type=int, default=1_000, help="partitions of the ranged run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        _report(_CHILDREN[given.child](Path.cwd(), given))
        return
    found = machine()
    print(
        f"{found['cores']} cores ({found['cpu']}), {found['memory']}, Python {found['python']}.\n"
    )
    with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as folder:
        root = Path(folder)
        _write_source(root / "plan", given.partitions, given.files)
        _settle(root / "plan", given.partitions)
        planned = _child("plan", root / "plan", given)
        print(f"planning {given.partitions:,} partitions that are done, of {given.files} files and")
        print(f"fragments each, in {len(STAGES)} stages: {planned['seconds']:.1f} s, ", end="")
        print(f"{planned['mebibytes']:.0f} MiB at most\n")
        _write_source(root / "run", given.run, 1)
        for kind, label in _RUNS.items():
            seconds = _child(kind, root / "run", given)["seconds"]
            print(f"{label}: {1000 * seconds / given.run:.1f} ms a partition ({seconds:.1f} s)")


_RUNS = {
    "bare": "a ranged run without Dagster's events, after its first commit",
    "step": "the same as a Dagster step, with an event for each stage of each partition",
}


def _pipeline(root: Path, keys: Sequence[str]) -> vd.Pipeline:
    pipeline = vd.Pipeline(
        "many",
        source=vd.parquet(str(root / "source" / "{partition_key}")),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(list(keys)),
    )
    clean = pipeline.project("clean", ["id", "x"])
    clean.map_batches("added", AddOne, schema={"y": "BIGINT"}, concurrency=2)
    return pipeline


def _keys(count: int) -> list[str]:
    return [f"p{number:06}" for number in range(count)]


def _write_source(root: Path, partitions: int, files: int) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(ROWS), "x": range(ROWS)}), sink)
    data = sink.getvalue().to_pybytes()
    for key in _keys(partitions):
        folder = root / "source" / key
        folder.mkdir(parents=True)
        for number in range(files):
            (folder / f"{number}.parquet").write_bytes(data)


def _store(root: Path) -> Store:
    return vd.FragmentStore(root=str(root / "store")).open()


def _settle(root: Path, partitions: int) -> None:
    """Commit every partition without the parts themselves: planning must not read them."""
    keys, store = _keys(partitions), _store(root)
    planned = plan_run(_pipeline(root, keys), STAGES, keys, store)
    for partition in planned.partitions:
        upstream: dict[str, str] = {}
        for stage in planned.selected:
            manifest = _manifest(planned, partition, stage, upstream)
            upstream = {stage: str(store.commit(manifest))}


def _manifest(
    planned: RunPlan, partition: PartitionPlan, stage: str, upstream: dict[str, str]
) -> Manifest:
    wanted = partition.stages[stage]
    return Manifest(
        pipeline=planned.pipeline.name,
        stage=stage,
        partition=partition.key,
        generation=wanted.generation,
        plan=wanted.digest,
        definition=planned.definitions[stage],
        schema=partition.schemas[stage],
        fragments=partition.fragments,
        parts=[PartInfo(key, "0" * 16, ROWS, 1000, 0, ROWS - 1) for key in wanted.keys],
        files=partition.files,
        upstream=upstream,
        run_id="benchmark",
        committed_at=time.time(),
    )


def _child(kind: str, root: Path, given: argparse.Namespace) -> dict[str, float]:
    """Measure in a separate process, with its own time and memory."""
    here = str(Path(__file__).resolve().parents[1])
    options = ["--partitions", given.partitions, "--files", given.files, "--run", given.run]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--child", kind, *map(str, options)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": here, "DAGSTER_DISABLE_TELEMETRY": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _report(found: dict[str, float]) -> None:
    print(json.dumps(found))


def _plan(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.partitions)
    pipeline, store = _pipeline(root, keys), _store(root)
    start = time.perf_counter()
    planned = plan_run(pipeline, STAGES, keys, store)
    seconds = time.perf_counter() - start
    assert not planned.failed
    assert not planned.needed()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "mebibytes": peak / (1 << (20 if sys.platform == "darwin" else 10))}


def _bare(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.run)
    commits: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Committed):
            commits.append(time.perf_counter())

    store = vd.FragmentStore(root=str(root / "bare")).open()
    pipeline = _pipeline(root, keys)
    run_pipeline(
        pipeline,
        STAGES,
        keys,
        vd.LocalCompute(),
        store,
        "run",
        listen=listen,
        log=lambda _: None,
        check=lambda: None,
        check_runner=CheckRunner(pipeline, store),
    )
    assert len(commits) == len(STAGES) * given.run
    return {"seconds": commits[-1] - commits[0]}


def _step(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.run)
    edges = {"start": keys[0], "end": keys[-1]}
    resources = {
        "compute": vd.LocalCompute(),
        "store": vd.FragmentStore(root=str(root / "step")),
    }
    with dg.DagsterInstance.local_temp(str(root)) as instance:
        result = dg.materialize(
            [_pipeline(root, keys).build_assets()],
            instance=instance,
            resources=resources,
            tags={f"dagster/asset_partition_range_{edge}": key for edge, key in edges.items()},
        )
        (stats,) = instance.get_run_step_stats(result.run_id)
    assert stats.start_time is not None
    assert stats.end_time is not None
    return {"seconds": stats.end_time - stats.start_time}


_CHILDREN = {"plan": _plan, "bare": _bare, "step": _step}

if __name__ == "__main__":
    main()
