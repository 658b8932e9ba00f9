"""vane_dagster: one stage with row keys, which is the default, all partitions in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pyarrow as pa
import ray

import vane_dagster as vd
from benchmarks.contenders.vane import own_home, serve
from benchmarks.harness import BenchmarkError
from benchmarks.job import Job, Result
from benchmarks.second_day.days import PARTITIONS

__all__ = ["read", "run", "serve"]

KEYS = [f"p{number:02}" for number in range(PARTITIONS)]
RANGE = {
    "dagster/asset_partition_range_start": KEYS[0],
    "dagster/asset_partition_range_end": KEYS[-1],
}
STORE, STAGE = "store", "outputs"


def run(job: Job, add_stage: Callable[[vd.Pipeline, Job], None] | None = None) -> Result:
    """Materialize all partitions; a poisoned row is quarantined, and fails no run.

    Args:
        job: The day.
        add_stage: Adds the stage to the pipeline; by default that of the model.
    """
    own_home(job)
    (step,) = job.steps
    start = time.perf_counter()
    texts = vd.Pipeline(
        "texts",
        source=vd.parquet(f"{step.source}/{{partition_key}}.parquet"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(KEYS),
    )
    (add_stage or embed)(texts, job)
    store = vd.FragmentStore(root=str(Path(step.out, STORE)))
    compute = vd.LocalCompute() if job.workload == "local" else vd.RayCompute()
    with dg.DagsterInstance.local_temp(job.temp) as instance:
        dg.materialize(
            [texts.build_assets()],
            instance=instance,
            tags=RANGE,
            resources={"compute": compute, "store": store},
        )
    versions = {"vane_dagster": vd.__version__, "dagster": dg.__version__, "ray": ray.__version__}
    return Result([time.perf_counter() - start], versions)


def embed(texts: vd.Pipeline, job: Job) -> None:
    """Add the stage of the model."""
    from embedder import Embed  # type: ignore[import-not-found,unused-ignore]  # of the day

    texts.map_batches(
        STAGE,
        Embed,
        columns=["text"],
        schema={"embedding": "FLOAT[384]"},
        batch_size=64,
        on_error="quarantine",
        concurrency=2,
        fn_constructor_kwargs={"quick": job.quick},
    )


def read(out: Path, failing: set[int]) -> pa.Table:
    """Return the rows as somebody reads them who uses the store.

    Args:
        out: The folder of outputs.
        failing: Ids of the rows on which the function raises.

    Raises:
        BenchmarkError: If other rows are quarantined, or a row is in another's partition.
    """
    store = vd.FragmentStore(root=str(out / STORE))
    tables = [vd.load(f"texts/{STAGE}", key, store=store) for key in KEYS]
    for number, table in enumerate(tables):
        if any(id % PARTITIONS != number for id in table["id"].to_pylist()):
            raise BenchmarkError(f"{KEYS[number]} has rows of another partition")
    found = set(vd.quarantine(f"texts/{STAGE}", store=store)["id"].to_pylist())
    if found != failing:
        raise BenchmarkError(f"quarantined: {found}; expected {failing}")
    return pa.concat_tables(tables)
