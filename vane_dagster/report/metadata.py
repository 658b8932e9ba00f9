"""Metadata of materializations, under Dagster's own names where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dagster as dg
import pyarrow as pa

from vane_dagster.commit.manifest import Manifest, ManifestName
from vane_dagster.commit.publish import publish_folders
from vane_dagster.commit.store import Store
from vane_dagster.declare.schema import sql_name
from vane_dagster.declare.stage import StageSpec
from vane_dagster.execute.events import StageStats


@dataclass
class PoolUse:
    """What a run had of a model's pool.

    Attributes:
        loads: Workers that constructed the model in this run.
        warm: Workers that had it already.
        load_seconds: The longest construction, in this run or before.
    """

    loads: int = 0
    warm: int = 0
    load_seconds: float = 0.0


def column_schema(schema: pa.Schema, id: str) -> dg.TableSchema:
    """An Arrow schema as Dagster shows it, in the SQL types that users write."""
    unique = dg.TableColumnConstraints(nullable=False, unique=True)
    return dg.TableSchema(
        [
            dg.TableColumn(
                field.name,
                sql_name(field.type) or str(field.type),
                constraints=unique if field.name == id else None,
            )
            for field in schema
        ]
    )


def stage_metadata(
    spec: StageSpec,
    id: str,
    partition: str | None,
    manifest: Manifest,
    name: ManifestName,
    store: Store,
    stats: StageStats,
    pool: PoolUse | None,
) -> dict[str, Any]:
    """Metadata of one partition of a stage, as plain numbers, texts and a schema."""
    published = publish_folders(spec, partition)
    manifests = store.manifests(manifest.pipeline, manifest.stage, partition)
    rows = "dagster/row_count" if partition is None else "dagster/partition_row_count"
    found: dict[str, Any] = {
        rows: manifest.rows,
        "dagster/column_schema": column_schema(manifest.schema, id),
        "dagster/uri": published[0].url if published else manifests.file_url(str(name)),
        "bytes": manifest.size,
        "fragments": len(manifest.parts),
        "fragments_computed": stats.computed,
        "fragments_reused": len(manifest.parts) - stats.computed,
        "seconds": round(stats.seconds, 3),
    }
    if stats.computed:
        found["rows_per_second"] = round(stats.rows_per_second, 1)
        found["worker_seconds"] = round(stats.work_seconds, 3)
    if stats.batches:
        found["batches"] = stats.batches
        found["seconds_in_user_code"] = round(stats.call_seconds, 3)
        found["milliseconds_per_batch"] = round(1000 * stats.call_seconds / stats.batches, 2)
    if pool is not None:
        found["model_loads"] = pool.loads
        found["warm_hits"] = pool.warm
        found["model_load_seconds"] = round(pool.load_seconds, 3)
    return found
