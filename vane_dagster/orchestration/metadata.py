"""Metadata of materializations, with Dagster's standard names where they exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

from vane_dagster._texts import markdown_table
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.storage.column_stats import merge_measures
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.store import Store
from vane_dagster.types.schema import type_name

_FIRST = (
    "rows_per_second", "seconds", "rows_computed", "rows_copied", "model_loads", "warm_hits",
    "cost",
)  # fmt: skip
"""The figures of a computation that have an entry, which Dagster plots; others are details."""
_MAX_REPLICAS = 10
_SHORT = 8


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
    """Describe the columns that a column depends on, such as ``from docs/clean: text, title``."""
    by_asset: dict[str, list[str]] = {}
    for source in sources:
        by_asset.setdefault(source.asset_key.to_user_string(), []).append(source.column_name)
    each = [f"{key}: {', '.join(columns)}" for key, columns in by_asset.items()]
    return f"from {'; '.join(each)}" if each else None


def column_metadata(
    manifest: Manifest, id: str, key_of: Callable[[str], dg.AssetKey]
) -> dict[str, Any]:
    """Return the metadata of a stage's columns.

    It is the same for most partitions and accounts for most of an event's bytes.
    """
    lineage = dg.TableColumnLineage(
        {
            name: [dg.TableColumnDep(key_of(node), column) for node, column in sources]
            for name, sources in manifest.lineage.items()
        }
    )
    schema = column_schema(manifest.schema, id, lineage)
    return {"dagster/column_schema": schema, "dagster/column_lineage": lineage}


def stage_metadata(
    spec: StageSpec,
    manifest: Manifest,
    version: ManifestName,
    store: Store,
    computed: int | None,
    adopted: str = "",
) -> dict[str, Any]:
    """Return the metadata of one partition of a stage: figures to plot, and all else as details.

    `docs/metadata.md` defines each entry. `computed` is None if the partition was up to date.
    """
    home, published = Store(manifest.root or store.root), manifest.published
    folder = home.manifests(manifest.pipeline, manifest.stage, manifest.partition)
    rows = "dagster/row_count" if manifest.partition is None else "dagster/partition_row_count"
    figures, partition = dict(manifest.figures), _partition_figures(spec, manifest)
    servers = figures.pop("servers", ())
    if "cost_spent" in figures:
        figures["cost"] = figures.pop("cost_spent")
    first = {name: figures[name] for name in _FIRST if name in figures}
    if computed is None:
        first = {name: 0 * value for name, value in first.items() if name != "rows_per_second"}
        figures = {"computed_by_run": manifest.run_id[:_SHORT], **figures}
    else:
        figures = {name: value for name, value in figures.items() if name not in first}
    if failed := partition.pop("rows_quarantined"):
        first["rows_quarantined"] = failed
    fragments = computed or 0
    details = {
        "fragments_computed": str(fragments),
        "fragments_reused": str(max(0, len(manifest.parts) - fragments)),
        "adopted": adopted,
        **partition,
        **figures,
    }
    lines = [
        {"figure": name.replace("_", " "), "value": n if isinstance(n, str) else f"{n:,}"}
        for name, n in details.items()
        if n
    ]
    sections = [markdown_table(lines)]
    if servers:
        sections.append(markdown_table(servers[:_MAX_REPLICAS]))
    if manifest.sample:
        sections += ["Sample of the rows:", markdown_table(manifest.sample)]
    return {
        rows: manifest.rows,
        **first,
        "details": dg.MetadataValue.md("\n\n".join(sections)),
        "dagster/uri": published.url if published else folder.file_url(str(version)),
    }


def _partition_figures(spec: StageSpec, manifest: Manifest) -> dict[str, Any]:
    """Return what a partition consists of, whichever run computed it."""
    figures: dict[str, Any] = {"bytes": manifest.size}
    if manifest.published and manifest.published.version is not None:
        figures["table_version"] = str(manifest.published.version)
    for name in ("quarantined", "nulled", "unread"):
        figures[f"rows_{name}"] = sum(getattr(part, name) for part in manifest.parts)
    if (usage := spec.usage) is not None:
        answers = usage.metadata(usage.used(merge_measures(p.measures for p in manifest.parts)))
        figures |= {"cost_of_answers" if n == "cost" else n: each for n, each in answers.items()}
        inherited = usage.used(merge_measures(part.inherited for part in manifest.parts))
        figures |= usage.partial("inherited", inherited)
    return figures
