"""vane_dagster: one stage, materialized through Dagster, on this job's own LocalCluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pyarrow as pa
import ray

import vane_dagster as vd
from benchmarks.job import Job, Result, Step
from benchmarks.workloads import Workload, workload

NAME = "benchmark"


@contextmanager
def serve(job: Job) -> Iterator[dict[str, str]]:
    """Run a local cluster that outlives the processes of the steps."""
    from vane_dagster.compute.local_head import LocalHead

    own_home(job)
    head = LocalHead()
    try:
        head.ensure()
        yield {}
    finally:
        head.stop()


def run(job: Job, keyed: bool = False) -> Result:
    """Materialize one partition per step.

    Args:
        job: The steps.
        keyed: Whether the stage names the columns that it reads, so that rows have keys.
    """
    own_home(job)
    work = workload(job.workload, job.quick)
    pipeline = _pipeline(work, job, keyed)
    seconds, calls = [], []
    with dg.DagsterInstance.local_temp(job.temp) as instance:
        for step in job.steps:
            start = time.perf_counter()
            seconds.append(_step(pipeline, step, instance))
            calls.append(time.perf_counter() - start)
    versions = {
        "vane_dagster": vd.__version__,
        "dagster": dg.__version__,
        "ray": ray.__version__,
        "pyarrow": pa.__version__,
    }
    return Result(
        seconds,
        versions,
        # The store contains all parts and row records; only parts of this stage are the output.
        [f"{NAME}/mapped/parts/{step.name}/*[0-9a-f].parquet" for step in job.steps],
        {f"materialize_call_{number}": call for number, call in enumerate(calls)},
    )


def own_home(job: Job) -> None:
    """Separate this job's cluster from any other cluster of this environment."""
    os.environ["VANE_DAGSTER_HOME"] = job.temp
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"


def _pipeline(work: Workload, job: Job, keyed: bool) -> vd.Pipeline:
    source = Path(job.steps[0].source).parent
    keys = [f"p{index}" for index in range(work.partitions)]
    pipeline = vd.Pipeline(
        NAME,
        source=vd.parquet(f"{source}/{{partition_key}}/*.parquet"),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(keys),
    )
    floats = {name: "FLOAT" for name in work.keeps if name != "id"}
    added = "FLOAT[384]" if work.key == "a" else "FLOAT"
    pipeline.map_batches(
        "mapped",
        work.udf,
        columns=work.reads if keyed else None,
        include_columns=[*floats] if keyed else (),
        schema={work.adds: added} if keyed else {"id": "BIGINT", **floats, work.adds: added},
        batch_size=work.batch_size,
        concurrency=work.workers,
        fn_constructor_kwargs=work.udf_kwargs(job.marks),
        # Without a version, the folder of marks would count, to which the UDF writes.
        reuse=vd.Reuse(version="1"),
    )
    return pipeline


def _step(pipeline: vd.Pipeline, step: Step, instance: dg.DagsterInstance) -> float:
    """Materialize a partition into its own store, so that every pass computes it anew.

    Returns:
        Seconds of Dagster's step.
    """
    result = dg.materialize(
        [pipeline.build_assets()],
        partition_key=step.name,
        instance=instance,
        resources={
            "compute": vd.RayCompute(),
            "store": vd.FragmentStore(root=step.out),
        },
    )
    return step_seconds(instance, result.run_id)


def step_seconds(instance: dg.DagsterInstance, run_id: str) -> float:
    """Return the seconds of a run's step, from its start event to its end event.

    Args:
        instance: The instance that has its events.
        run_id: A run of one step.
    """
    (stats,) = instance.get_run_step_stats(run_id)
    assert stats.start_time is not None
    assert stats.end_time is not None
    return stats.end_time - stats.start_time
