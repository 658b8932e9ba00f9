"""Daft with its checkpoints, which need its Ray runner, and a UDF that leaves errors out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import daft  # type: ignore[import-not-found,unused-ignore]  # it may be in another environment
import ray

from benchmarks.job import Job, Result
from benchmarks.workloads import DIMENSIONS

# With the two of this machine the query never starts: actors of models and of keys hold them all.
LOGICAL_CPUS = 8
# Daft 0.7.26 sometimes aborts at interpreter shutdown (PyGILState_Release), after its work.
EXIT_AT_ONCE = True
# Daft calls a model in other threads than the one that set torch's number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
VECTOR = daft.DataType.fixed_size_list(daft.DataType.float32(), DIMENSIONS)


@contextmanager
def serve(job: Job) -> Iterator[dict[str, str]]:
    """Run a local cluster that outlives the process of the day."""
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


def run(job: Job, answer: Any = None, output: str = "embedding") -> Result:
    """Compute the rows whose keys are not in the checkpoints.

    Args:
        job: The day.
        answer: Adds the output to the rows; by default with the model.
        output: The column of outputs.
    """
    (step,) = job.steps
    start = time.perf_counter()
    ray.init(
        address=job.service["address"],
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    daft.set_runner_ray(noop_if_initialized=True)
    store = daft.CheckpointStore(f"file://{step.out}/checkpoint")
    checkpoint = daft.CheckpointConfig(store=store, on="key")
    rows = daft.read_parquet(f"{step.source}/*.parquet", checkpoint=checkpoint)
    if answer is None:
        rows = rows.with_column(output, model(max_concurrency=2)(job.quick)(rows["text"]))
    else:
        rows = answer(rows)
    rows.select("id", "key", output).write_parquet(f"{step.out}/rows")
    return Result([time.perf_counter() - start], {"daft": daft.__version__})


def model(compute: Callable[[Any, Any], Any] | None = None, **options: Any) -> Any:
    """Return the model's class.

    Args:
        compute: Computes a batch; by default its method.
        **options: Options of `daft.cls`.
    """
    from embedder import Embed  # type: ignore[import-not-found,unused-ignore]  # in the day's folder

    @daft.cls(**options)
    class Model:
        def __init__(self, quick: bool) -> None:
            self.embed = Embed(quick)

        # Daft's decorators have no types.
        @daft.method.batch(  # type: ignore[untyped-decorator,unused-ignore]  # Daft has no types
            return_dtype=VECTOR, batch_size=64, on_error="log"
        )
        def __call__(self, text: Any) -> Any:
            return (compute or Embed.compute)(self.embed, text.to_arrow())

    return Model
