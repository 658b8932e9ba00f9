"""vane_dagster: partitions of a pipeline, materialized through Dagster, on a cluster of its own."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import dagster as dg
import pyarrow as pa
import ray

import vane_dagster as vd
from benchmarks.contenders.vane import own_home, serve
from benchmarks.job import Job, Result

__all__ = ["run", "serve"]

OUTPUTS = {
    "audio": "audio/text",
    "documents": "documents/embeddings",
    "images": "images/labels",
    "video": "video/detections",
}
"""The last stage of each pipeline, whose parts are the output."""


def run(job: Job) -> Result:
    """Materialize one partition per step."""
    own_home(job)
    module = importlib.import_module(f"benchmarks.media.pipelines.{job.workload}_vane")
    source, out = Path(job.steps[0].source).parent, Path(job.steps[0].out).parent
    days = dg.StaticPartitionsDefinition([step.name for step in job.steps])
    assets = module.pipeline(str(source), days).build_assets()
    resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(out))}
    definitions = dg.Definitions(assets=[assets], resources=resources)
    work = definitions.resolve_implicit_global_asset_job_def()
    seconds = []
    with dg.DagsterInstance.local_temp(job.temp) as instance:
        for step in job.steps:
            start = time.perf_counter()
            work.execute_in_process(instance=instance, partition_key=step.name)
            seconds.append(time.perf_counter() - start)
    versions = {
        "vane_dagster": vd.__version__,
        "dagster": dg.__version__,
        "ray": ray.__version__,
        "pyarrow": pa.__version__,
    }
    return Result(
        seconds,
        versions,
        # The store is the parent of the folders of the steps.
        [f"../{OUTPUTS[job.workload]}/parts/{step.name}/*.parquet" for step in job.steps],
    )
