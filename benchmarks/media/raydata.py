"""Ray Data on a local cluster of four logical CPUs; see `benchmarks.contenders.raydata`."""

from __future__ import annotations

import importlib
import time

import pyarrow as pa
import ray
import ray.data

from benchmarks.contenders.raydata import connect, serve
from benchmarks.job import Job, Result

__all__ = ["run", "serve"]


def run(job: Job) -> Result:
    """Connect, then run a step for each partition."""
    seconds = []
    start = time.perf_counter()
    pipeline = importlib.import_module(f"benchmarks.media.pipelines.{job.workload}_raydata")
    connect(job)
    for step in job.steps:
        pipeline.run(step.source, step.out)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    ray.shutdown()
    return Result(seconds, {"ray": ray.__version__, "pyarrow": pa.__version__})
