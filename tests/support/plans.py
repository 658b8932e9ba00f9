"""A pipeline with every kind of stage, planned and committed without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vane_dagster as vd
from support.arguments import grouped
from support.data import write_source
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.run_state import RunState
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.store import Store


def double(batch, by=2):
    return batch


def triple(batch):
    return batch


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch):
        return batch


def source(tmp_path: Path, files: dict[str, int]) -> None:
    """Write files with the given numbers of rows and with distinct ids."""
    for name, rows in files.items():
        ids = [f"{name}-{n}" for n in range(rows)]
        write_source(tmp_path / "src", {"id": ids, "n": range(rows), "text": ids}, name)


def docs(
    tmp_path: Path,
    fn: Any = double,
    where: str | None = None,
    text: str = "trim(text)",
    factor: int = 3,
    how: Any = "inner",
    out: str = "out",
    compression: str = "zstd",
    fragment_rows: int | None = None,
    clean: dict[str, Any] | None = None,
    **doubled: Any,
) -> vd.Pipeline:
    """Declare source -> clean -> doubled, scaled -> joined -> out; doubled gets the rest."""
    docs = vd.Pipeline(
        "docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=fragment_rows
    )
    cleaned = docs.project("clean", {"text": text, "n": "n"}, where=where, **grouped(clean or {}))
    first = cleaned.map_batches("doubled", fn, **grouped({"schema": {"x": "BIGINT"}, **doubled}))
    second = cleaned.map_batches(
        "scaled", Scale, schema={"y": "BIGINT"}, fn_constructor_kwargs={"factor": factor}
    )
    joined = docs.join("joined", cleaned, first, second, how=how)
    joined.write("out", str(tmp_path / out), compression=compression)
    return docs


def plan(pipeline: vd.Pipeline, store: Store, *stages: str, **given: Any) -> RunPlan:
    return plan_run(pipeline, stages or tuple(pipeline.stages), [None], store, **given)


def keys(planned: RunPlan) -> dict[str, tuple[str, ...]]:
    assert not planned.failed, planned.failed
    return {stage: p.keys for stage, p in planned.partitions[0].stages.items()}


def settle(planned: RunPlan, store: Store) -> list[Manifest]:
    """Commit a plan without computing it: an empty part for each missing one."""
    assert not planned.failed, planned.failed
    events: list[Any] = []
    state = RunState(planned, store, "run", events.append, CheckRunner(planned.pipeline, store))
    state.begin()
    for index, partition in enumerate(planned.partitions):
        for stage, wanted in partition.stages.items():
            spec = planned.pipeline[stage].spec
            publisher = spec.publisher(partition.key)
            folder = store.parts(planned.pipeline.name, stage, partition.key)
            folder = publisher.staging if publisher else folder
            for i in wanted.missing:
                table = partition.schemas[stage].empty_table()
                info = write_part(table, PartTarget(folder, wanted.keys[i], "id"))
                state.add_part(index, stage, i, Part(folder, info))
    state.close()
    failures = [event.error for event in events if hasattr(event, "error")]
    assert not failures, failures
    return [event.manifest for event in events if hasattr(event, "manifest")]


def missing(planned: RunPlan) -> dict[str, int]:
    return {stage: planned.missing(stage) for stage in planned.selected if planned.missing(stage)}
