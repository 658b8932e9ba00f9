"""Ray Data, tuned; the README of the parent folder lists the settings that were tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import ray
import ray.data

from benchmarks.job import Job, Result, Step
from benchmarks.workloads import Workload, workload

# Enough blocks to keep both actors busy to the end, and no more: each block costs its own tasks.
BLOCKS = {"a": 2, "b": 20, "c": 16}
# Two actors of one CPU each on two CPUs leave none for reading and writing: the run hangs.
LOGICAL_CPUS = 4
ACTOR_CPUS = 0.5


@contextmanager
def serve(job: Job) -> Iterator[dict[str, str]]:
    """Run a local cluster that outlives the processes of the steps."""
    context = ray.init(
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=job.temp,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield {"address": context.address_info["address"]}
    finally:
        ray.shutdown()


def run(job: Job, function: Callable[[pa.Table], pa.Table] | None = None) -> Result:
    """Connect, then read, map and write each step.

    Args:
        job: The steps.
        function: Takes the place of the class; Ray Data then fuses reading, mapping and writing.
    """
    work = workload(job.workload, job.quick)
    seconds = []
    start = time.perf_counter()
    connect(job)
    for step in job.steps:
        if function is None:
            _step(work, job, step)
        else:
            _fused_step(work, function, step)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    ray.shutdown()
    return Result(seconds, {"ray": ray.__version__, "pyarrow": pa.__version__})


def connect(job: Job) -> None:
    """Connect to the cluster of `serve`, with the settings of every run."""
    ray.init(
        address=job.service["address"],
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    settings = ray.data.DataContext.get_current()
    settings.use_datasource_v2 = False
    settings.enable_progress_bars = False


def _step(work: Workload, job: Job, step: Step) -> None:
    rows = ray.data.read_parquet(step.source, override_num_blocks=BLOCKS[work.key])
    mapped = rows.map_batches(
        work.udf,
        batch_size=None if work.key == "c" else work.batch_size,
        batch_format="pyarrow",
        num_cpus=ACTOR_CPUS,
        compute=ray.data.ActorPoolStrategy(size=work.workers),
        fn_constructor_kwargs=work.udf_kwargs(job.marks),
    )
    mapped.write_parquet(step.out)


def _fused_step(work: Workload, function: Callable[[pa.Table], pa.Table], step: Step) -> None:
    # As many tasks at a time as the others have workers, each of which reads, maps and writes.
    cpus = LOGICAL_CPUS / work.workers
    rows = ray.data.read_parquet(step.source, override_num_blocks=BLOCKS[work.key], num_cpus=cpus)
    mapped = rows.map_batches(function, batch_size=None, batch_format="pyarrow", num_cpus=cpus)
    mapped.write_parquet(step.out, ray_remote_args={"num_cpus": cpus})
