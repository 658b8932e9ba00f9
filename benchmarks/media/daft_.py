"""Daft on its native runner."""

from __future__ import annotations

import importlib
import os
import time

import daft  # type: ignore[import-not-found,unused-ignore]  # it may be in another environment
import pyarrow as pa

from benchmarks.job import Job, Result

# Daft 0.7.26 sometimes aborts at interpreter shutdown (PyGILState_Release), after its work.
EXIT_AT_ONCE = True
# Daft calls a model in other threads than the one that set torch's number of threads.
os.environ["OMP_NUM_THREADS"] = "1"


def run(job: Job) -> Result:
    """Run a step for each partition."""
    seconds = []
    start = time.perf_counter()
    pipeline = importlib.import_module(f"benchmarks.media.pipelines.{job.workload}_daft")
    daft.set_runner_native()
    for step in job.steps:
        pipeline.run(step.source, step.out)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return Result(seconds, {"daft": daft.__version__, "pyarrow": pa.__version__})
