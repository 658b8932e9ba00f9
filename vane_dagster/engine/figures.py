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
    figures: dict[str, Any] = {"seconds": round(stats.seconds, 3), "rows_computed": stats.rows_in}
    if stats.rows_in:
        figures["rows_per_second"] = round(stats.rows_per_second, 1)
    if stats.computed:
        figures["worker_seconds"] = round(stats.work_seconds, 3)
    if manifest.row_definition and stats.computed:
        figures["rows_copied"] = stats.copied
    if stats.retries:
        figures["retries"] = stats.retries
    if stats.fits:
        figures["batch_size"] = stats.fits
    if (busy := stats.gpus.utilization) is not None:
        figures["gpu_utilization"] = round(busy, 3)
    if stats.batches:
        figures["batches"] = stats.batches
        figures["seconds_in_user_code"] = round(stats.call_seconds, 3)
    if (usage := spec.usage) is not None and stats.computed:
        if stats.seconds:
            tokens = stats.spent["completion_tokens"] / stats.seconds
            figures["tokens_per_second"] = round(tokens, 1)
        figures |= usage.partial("spent", stats.spent)
    if stats.computed and spec.runs_udf and spec.udf.stateful:
        figures["model_loads"] = stats.loads.loads
        figures["model_load_seconds"] = round(stats.loads.load_seconds, 3)
        figures["warm_hits"] = stats.loads.warm
    if stats.servers is not None:
        figures["server_starts"] = stats.servers.starts
        figures["server_start_seconds"] = round(stats.servers.start_seconds, 3)
        figures["server_warm_hits"] = stats.servers.warm_hits
        figures["server_restarts"] = stats.servers.restarts
        figures["servers"] = [*stats.servers.replicas]
    return figures
