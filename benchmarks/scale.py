"""How the driver scales with workers, partitions and parts.

``python -m benchmarks.scale`` creates its data in a temporary folder, and prints four figures, each
measured in a process of its own: how busy one driver keeps simulated workers, planning, a store
with many parts, and a ranged run. There is no comparison to other frameworks.
"""

from __future__ import annotations

import argparse
import hashlib
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
from benchmarks.sleeping_workers import simulate
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.events import Committed, Event
from vane_dagster.orchestration.run import RunContext, run_pipeline
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.planning.plan import PartitionPlan, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.gc import GcPolicy, GcReport, collect
from vane_dagster.storage.manifest import (
    FileRecord,
    FragmentRecord,
    Manifest,
    ManifestName,
    PartInfo,
)
from vane_dagster.storage.store import Store

STAGES = ("clean", "added")
ROWS = 10
PARTS = 1000
"""Parts of a partition of the store with many parts."""
UNNEEDED = 10
"""Parts more in each of its partitions, which no manifest names."""
DAY = 86_400.0
KINDS = ("workers", "plan", "parts", "run")
_SETTLED_AT_ONCE = 20_000


class AddOne:
    """A model that costs nothing."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        return {"y": [x + 1 for x in batch["x"].to_pylist()]}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=KINDS, help="a figure")
    parser.add_argument("--workers", type=int, default=1_000, help="simulated workers")
    parser.add_argument("--tasks", type=int, default=40, help="tasks of 1 s for each worker")
    parser.add_argument("--fragments", type=int, default=40, help="in each simulated partition")
    parser.add_argument("--partitions", type=int, default=10_000, help="to plan")
    parser.add_argument("--files", type=int, default=10, help="in each partition to plan")
    parser.add_argument("--parts", type=int, default=100_000, help="in the store with many parts")
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
    for kind in given.only or KINDS:
        with tempfile.TemporaryDirectory(prefix="vs-", dir="/tmp") as folder:
            _PRINT[kind](Path(folder), given)
        print(flush=True)


def _print_workers(root: Path, given: argparse.Namespace) -> None:
    _write_source(root, given.tasks * given.workers // given.fragments, 1, given.fragments)
    found = _child("workers", root, given)
    print(
        f"{given.workers:,} simulated workers, {given.tasks} tasks of 1 s for each, partitions of"
    )
    print(f"{given.fragments} fragments: busy {found['steady']:.1%} in the middle half, ", end="")
    print(f"{found['busy']:.1%} from the first call to the last;")
    print(f"driver: {found['ms']:.2f} ms CPU a call, {found['mebibytes']:.0f} MiB at most")


def _print_plan(root: Path, given: argparse.Namespace) -> None:
    _write_source(root, given.partitions, given.files)
    new = _child("plan", root, given)
    _settle(root, given.partitions)
    done = _child("plan", root, given)
    print(f"planning {given.partitions:,} partitions of {given.files} files in ", end="")
    print(f"{len(STAGES)} stages:")
    for label, found in (("done", done), ("new", new)):
        print(f"  {label}: {found['seconds']:.1f} s, {found['mebibytes']:.0f} MiB at most")


def _print_parts(root: Path, given: argparse.Namespace) -> None:
    _write_parts(root, given.parts // PARTS)
    found = _child("parts", root, given)
    print(f"a store with {given.parts:,} parts in partitions of {PARTS:,}: a collection marks in")
    print(f"{found['mark']:.1f} s and deletes in {found['delete']:.1f} s; ", end="")
    print(f"a row is traced in {found['trace']:.2f} s; {found['mebibytes']:.0f} MiB at most")


def _print_run(root: Path, given: argparse.Namespace) -> None:
    _write_source(root, given.run, 1)
    for kind, label in _RUNS.items():
        seconds = _child(kind, root, given)["seconds"]
        print(f"{label}: {1000 * seconds / given.run:.1f} ms a partition ({seconds:.1f} s)")


_PRINT = {
    "workers": _print_workers,
    "plan": _print_plan,
    "parts": _print_parts,
    "run": _print_run,
}
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


def _write_source(root: Path, partitions: int, files: int, row_groups: int = 1) -> None:
    sink, rows = pa.BufferOutputStream(), range(ROWS * row_groups)
    pq.write_table(pa.table({"id": rows, "x": rows}), sink, row_group_size=ROWS)
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
    for first in range(0, partitions, _SETTLED_AT_ONCE):
        some = keys[first : first + _SETTLED_AT_ONCE]
        planned = plan_run(_pipeline(root, some), STAGES, some, store)
        for partition in planned.partitions:
            upstream: dict[str, str] = {}
            for stage in planned.selected:
                manifest = _manifest(planned, partition, stage, upstream)
                upstream = {stage: _commit(store, manifest)}


def _commit(store: Store, manifest: Manifest) -> str:
    """Write the first manifest of a partition, without waiting for the disk."""
    name = str(ManifestName(1, manifest.generation, manifest.plan, manifest.content))
    place = store.manifests(manifest.pipeline, manifest.stage, manifest.partition)
    Path(place.path).mkdir(parents=True)
    Path(place.file(name)).write_bytes(manifest.dumps())
    return name


def _write_parts(root: Path, partitions: int) -> None:
    """Write a stage with many parts. Those of a partition are one file under many names."""
    store, month = _store(root), time.time() - 30 * DAY
    rows = range(ROWS * PARTS)
    pq.write_table(pa.table({"id": rows}), root / "source.parquet")
    pq.write_table(pa.table({"id": range(ROWS)}), root / "part.parquet")
    data = (root / "part.parquet").read_bytes()
    size = (root / "source.parquet").stat()
    url = f"file://{root / 'source.parquet'}"
    source = FileRecord(url, size.st_size, str(size.st_mtime_ns))
    for key in _keys(partitions):
        digests = [hashlib.sha256(f"{key} {i}".encode()).hexdigest() for i in range(PARTS)]
        starts = range(0, len(rows), ROWS)
        manifest = Manifest(
            pipeline="many",
            stage="added",
            partition=key,
            generation="0",
            plan="0" * 32,
            definition="0" * 32,
            schema=pa.schema({"id": pa.int64()}),
            fragments=[
                FragmentRecord(url, start, start + ROWS, digest[:32], 1000)
                for start, digest in zip(starts, digests)
            ],
            parts=[
                PartInfo(digest[:40], digest[:16], ROWS, 1000, start, start + ROWS - 1)
                for start, digest in zip(starts, digests)
            ],
            files=[source],
            upstream={},
            run_id="benchmark",
            committed_at=month,
            kind="project",
            keys=("id",),
            reads=("source",),
            lineage={"id": [("source", "id")]},
        )
        _commit(store, manifest)
        folder = Path(store.parts("many", "added", key).path)
        folder.mkdir(parents=True)
        one, *others = [part.name for part in manifest.parts]
        (folder / one).write_bytes(data)
        os.utime(folder / one, (month, month))
        unneeded = [f"{i:040x}-{i:016x}.parquet" for i in range(UNNEEDED)]
        for name in [*others, *unneeded]:
            os.link(folder / one, folder / name)


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
    names = ("workers", "fragments", "partitions", "files", "run", "parts")
    options = [text for name in names for text in (f"--{name}", str(getattr(given, name)))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--child", kind, *options],
        cwd=root,
        env={**os.environ, "PYTHONPATH": here, "DAGSTER_DISABLE_TELEMETRY": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _report(found: dict[str, float]) -> None:
    print(json.dumps(found))


def _peak() -> float:
    """The largest memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << (20 if sys.platform == "darwin" else 10))


def _workers(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys, store = [path.name for path in (root / "source").iterdir()], _store(root)
    pipeline = vd.Pipeline(
        "many",
        source=vd.parquet(str(root / "source" / "{partition_key}")),
        id="id",
        fragment_rows=ROWS,
        partitions_def=dg.StaticPartitionsDefinition(sorted(keys)),
    )
    pipeline.map_batches(
        "added", AddOne, schema={"y": "BIGINT"}, concurrency=given.workers, batch_size=ROWS
    )
    planned = plan_run(pipeline, ("added",), sorted(keys), store, run_id="simulated")
    assert not planned.failed
    found = simulate(planned, store, given.workers, 1 / ROWS)
    return {
        "busy": found.busy,
        "steady": found.steady,
        "ms": 1000 * found.cpu_seconds / found.calls,
        "mebibytes": _peak(),
    }


def _plan(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.partitions)
    pipeline, store = _pipeline(root, keys), _store(root)
    start = time.perf_counter()
    planned = plan_run(pipeline, STAGES, keys, store)
    seconds = time.perf_counter() - start
    assert not planned.failed
    assert len({bool(p.fragments) for p in planned.partitions}) == 1, "all done, or none"
    return {"seconds": seconds, "mebibytes": _peak()}


def _parts(root: Path, given: argparse.Namespace) -> dict[str, float]:
    store, unneeded = _store(root), given.parts // PARTS * UNNEEDED

    def collected(days: float) -> tuple[float, GcReport]:
        start = time.perf_counter()
        (report,) = collect(store, GcPolicy(time.time() + days * DAY, 7 * DAY, DAY))
        return time.perf_counter() - start, report

    mark, marked = collected(0)
    delete, deleted = collected(2)
    assert len(marked.condemned) == len(deleted.deleted) == unneeded
    start = time.perf_counter()
    found = vd.trace("many/added", 5, _keys(1)[0], store=store.root.url)
    trace = time.perf_counter() - start
    assert "source.parquet" in str(found)
    return {"mark": mark, "delete": delete, "trace": trace, "mebibytes": _peak()}


def _bare(root: Path, given: argparse.Namespace) -> dict[str, float]:
    keys = _keys(given.run)
    commits: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Committed):
            commits.append(time.perf_counter())

    store = vd.FragmentStore(root=str(root / "bare")).open()
    pipeline = _pipeline(root, keys)
    context = RunContext(store, "run", CheckRunner(pipeline, store), listen=listen)
    run_pipeline(context, pipeline, STAGES, keys, vd.LocalCompute(), RunOptions())
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


_CHILDREN = {
    "workers": _workers,
    "plan": _plan,
    "parts": _parts,
    "bare": _bare,
    "step": _step,
}

if __name__ == "__main__":
    main()
