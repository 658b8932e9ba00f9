"""Metadata of materializations, with Dagster's standard names where they exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.storage.column_stats import merge_measures
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.publish.registry import publisher_class
from vane_dagster.storage.store import Store
from vane_dagster.tracing.command import trace_command
from vane_dagster.types.schema import type_name

_MAX_REPLICAS = 10


def column_schema(
    schema: pa.Schema, id: str, lineage: dg.TableColumnLineage | None = None
) -> dg.TableSchema:
    """Convert an Arrow schema to Dagster's, with the SQL types that users write.

    Dagster's open-source UI does not show column lineage, so the column descriptions contain it
    too.
    """
    unique = dg.TableColumnConstraints(nullable=False, unique=True)
    sources = lineage.deps_by_column if lineage else {}
    return dg.TableSchema(
        [
            dg.TableColumn(
                field.name,
                type_name(field.type),
                description=_derived(sources.get(field.name, ())),
                constraints=unique if field.name == id else None,
            )
            for field in schema
        ]
    )


def _derived(sources: Sequence[dg.TableColumnDep]) -> str | None:
    """Describe the columns that a column depends on, as ``from docs/clean: text, title``."""
    by_asset: dict[str, list[str]] = {}
    for source in sources:
        by_asset.setdefault(source.asset_key.to_user_string(), []).append(source.column_name)
    each = [f"{key}: {', '.join(columns)}" for key, columns in by_asset.items()]
    return f"from {'; '.join(each)}" if each else None


def column_lineage(
    manifest: Manifest, key_of: Callable[[str], dg.AssetKey]
) -> dg.TableColumnLineage | None:
    """Return the lineage of a stage's columns for Dagster; None if the manifest has none."""
    if not manifest.lineage:
        return None
    return dg.TableColumnLineage(
        {
            name: [dg.TableColumnDep(key_of(node), column) for node, column in sources]
            for name, sources in manifest.lineage.items()
        }
    )


def sample_table(sample: Sequence[Mapping[str, str]]) -> str:
    """Format sample rows as a Markdown table."""
    names = list(sample[0])
    lines = [_line([_cell(name) for name in names]), _line(["---"] * len(names))]
    lines += [_line([_cell(row[name]) for name in names]) for row in sample]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Escape a text so that it fits into one Markdown table cell."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", flat)


def column_metadata(
    manifest: Manifest, id: str, key_of: Callable[[str], dg.AssetKey]
) -> dict[str, Any]:
    """Return the metadata of a stage's columns.

    It is the same for most partitions and accounts for most of an event's bytes.
    """
    lineage = column_lineage(manifest, key_of)
    found: dict[str, Any] = {
        "dagster/column_schema": column_schema(manifest.schema, id, lineage),
    }
    if lineage:
        found["dagster/column_lineage"] = lineage
    return found


def stage_metadata(
    spec: StageSpec,
    manifest: Manifest,
    version: ManifestName,
    store: Store,
    figures: Mapping[str, Any],
    computed: int,
    inferred: str | None = None,
) -> dict[str, Any]:
    """Return the metadata of one partition of a stage, as plain numbers and texts.

    `docs/metadata.md` defines each entry, and states which ones add up over partitions.
    """
    home = Store(manifest.root or store.root)
    folder = home.manifests(manifest.pipeline, manifest.stage, manifest.partition)
    rows = "dagster/row_count" if manifest.partition is None else "dagster/partition_row_count"
    place = {"dagster/uri": folder.file_url(str(version))}
    if manifest.published:
        place = publisher_class(manifest.published.format).metadata(manifest.published)
    found: dict[str, Any] = {
        rows: manifest.rows,
        **place,
        "bytes": manifest.size,
        "fragments": len(manifest.parts),
        "fragments_computed": computed,
        "fragments_reused": max(0, len(manifest.parts) - computed),
    }
    for name in ("quarantined", "nulled", "unread", "waived", "patched"):
        if counted := sum(getattr(part, name) for part in manifest.parts):
            found[f"rows_{name}"] = counted
    if (usage := spec.usage) is not None:
        used = usage.used(merge_measures(part.measures for part in manifest.parts))
        found |= usage.metadata(used)
        inherited = usage.used(merge_measures(part.inherited for part in manifest.parts))
        if any(inherited.values()):
            found |= usage.partial("inherited", inherited)
    found |= figures
    if replicas := figures.get("servers"):
        found["servers"] = dg.MetadataValue.md(sample_table(replicas[:_MAX_REPLICAS]))
    if inferred is not None:
        found["schema"] = dg.MetadataValue.md(f"```python\n{inferred}\n```")
    if manifest.sample:
        found["sample"] = dg.MetadataValue.md(sample_table(manifest.sample))
    if command := trace_command(store, manifest):
        found["trace"] = dg.MetadataValue.md(f"`{command}`")
    return found
