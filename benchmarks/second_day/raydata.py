"""Ray Data with its job-level checkpointing, kept for later incremental executions."""

from __future__ import annotations

import time

import ray
import ray.data
from ray.data.checkpoint import CheckpointConfig

from benchmarks.contenders.raydata import ACTOR_CPUS, connect, serve
from benchmarks.job import Job, Result
from benchmarks.second_day.days import PARTITIONS

__all__ = ["run", "serve"]


def run(job: Job) -> Result:
    """Compute the rows whose keys have no checkpoint; a block with an error is left out."""
    from embedder import Embed  # type: ignore[import-not-found,unused-ignore]  # in the day's folder

    (step,) = job.steps
    start = time.perf_counter()
    connect(job)
    checkpointed(step.out)
    columns = ["id", "key", "text"]
    rows = ray.data.read_parquet(step.source, columns=columns, override_num_blocks=PARTITIONS)
    rows.map_batches(
        Embed,
        batch_size=64,
        batch_format="pyarrow",
        num_cpus=ACTOR_CPUS,
        compute=ray.data.ActorPoolStrategy(size=2),
        fn_constructor_kwargs={"quick": job.quick},
    ).write_parquet(f"{step.out}/rows")
    ray.shutdown()
    return Result([time.perf_counter() - start], {"ray": ray.__version__})


def checkpointed(out: str) -> None:
    """Keep checkpoints in the folder of outputs, and go on after errors."""
    settings = ray.data.DataContext.get_current()
    settings.max_errored_blocks = -1
    settings.checkpoint_config = CheckpointConfig(
        id_column="key",
        checkpoint_path=f"{out}/checkpoint",
        delete_checkpoint_on_success=False,
    )
