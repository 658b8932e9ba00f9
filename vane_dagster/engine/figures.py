"""What the computation of a stage's partition took, for its manifest."""

from __future__ import annotations

from typing import Any

from vane_dagster.events import StageStats
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.storage.manifest import Manifest


def computation_figures(spec: StageSpec, manifest: Manifest, stats: StageStats) -> dict[str, Any]:
    """Return the figures of a run's work on a partition, as JSON.

    `docs/metadata.md` defines each entry.
    """
    found: dict[str, Any] = {"seconds": round(stats.seconds, 3), "rows_computed": stats.rows_in}
    if stats.computed:
        found["rows_per_second"] = round(stats.rows_per_second, 1)
        found["worker_seconds"] = round(stats.work_seconds, 3)
    if manifest.row_definition and stats.computed:
        found["rows_copied"] = stats.copied
    if stats.retries:
        found["retries"] = stats.retries
    if stats.fits:
        found["batch_size"] = stats.fits
    if (busy := stats.gpus.utilization) is not None:
        found["gpu_utilization"] = round(busy, 3)
    if stats.batches:
        found["batches"] = stats.batches
        found["seconds_in_user_code"] = round(stats.call_seconds, 3)
    if (usage := spec.usage) is not None and stats.computed:
        if stats.seconds:
            tokens = stats.spent["completion_tokens"] / stats.seconds
            found["tokens_per_second"] = round(tokens, 1)
        found |= usage.partial("spent", stats.spent)
    if stats.computed and spec.runs_udf and spec.udf.stateful:
        found["model_loads"] = stats.loads.loads
        found["model_load_seconds"] = round(stats.loads.load_seconds, 3)
        found["warm_hits"] = stats.loads.warm
    if stats.servers is not None:
        found["server_starts"] = stats.servers.starts
        found["server_start_seconds"] = round(stats.servers.start_seconds, 3)
        found["server_warm_hits"] = stats.servers.warm_hits
        found["server_restarts"] = stats.servers.restarts
        found["servers"] = [*stats.servers.replicas]
    return found
