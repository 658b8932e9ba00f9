"""Daft on its native runner; the README lists the settings that were tried."""

from __future__ import annotations

import os
import time
from typing import Any

import daft  # type: ignore[import-not-found,unused-ignore]  # it may be in another environment
import pyarrow as pa

from benchmarks.job import Job, Result
from benchmarks.workloads import Workload, workload

# Daft 0.7.26 sometimes aborts at interpreter shutdown (PyGILState_Release), after its work.
EXIT_AT_ONCE = True
# Daft calls a model in other threads than the one that set torch's number of threads.
os.environ["OMP_NUM_THREADS"] = "1"


def run(job: Job) -> Result:
    """Read, map and write each step."""
    work = workload(job.workload, job.quick)
    seconds = []
    start = time.perf_counter()
    daft.set_runner_native()
    for step in job.steps:
        rows = daft.read_parquet(f"{step.source}/*.parquet")
        compute = _udf(work)(work.udf_kwargs(job.marks))
        added = compute(*[rows[name] for name in work.reads])
        rows.with_column(work.adds, added).select(*work.keeps, work.adds).write_parquet(step.out)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return Result(seconds, {"daft": daft.__version__, "pyarrow": pa.__version__})


def _udf(work: Workload) -> Any:
    # Without a limit Daft runs one thread per core, which was its fastest setting everywhere. With
    # more cores than the others have workers, the comparison would not be equal.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = None if (cores or 1) <= work.workers else work.workers
    batch_size = None if work.key == "c" else work.batch_size

    @daft.cls(max_concurrency=limit, use_process=False)
    class Adapter:
        def __init__(self, kwargs: dict[str, Any]) -> None:
            self.udf = work.udf(**kwargs)

        # Daft's decorators have no types.
        @daft.method.batch(  # type: ignore[untyped-decorator,unused-ignore]  # Daft has no types
            return_dtype=daft.DataType.from_arrow_type(work.arrow_type), batch_size=batch_size
        )
        def __call__(self, *columns: Any) -> Any:
            return self.udf.compute(*[column.to_arrow() for column in columns])

    return Adapter
