"""Where the `write` stages of a run in a branch store publish: never into the declared targets."""

from __future__ import annotations

from dataclasses import replace

from vane_dagster._arguments import PLACEHOLDER, check_placeholders
from vane_dagster.errors import PlanError, names
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.publish.registry import publisher_class
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.store import PUBLISHED, Store

_WITHOUT_FOLDER = ("iceberg",)
"""Formats whose tables are registered elsewhere, so they cannot be below a root."""


def with_branch_targets(pipeline: Pipeline, store: Store) -> Pipeline:
    """Return the pipeline as it publishes with a store."""
    if store.fallback is None:
        return pipeline
    writes = {f"{pipeline.name}/{s.name}": s.spec for s in pipeline if s.spec.publishes}
    named = [each for each in store.targets if each.partition("/")[0] == pipeline.name]
    if unknown := [each for each in named if each not in writes]:
        raise PlanError(
            f"FragmentStore: targets has {names(unknown)}, no write stage of pipeline "
            f"{pipeline.name!r}; expected {names(writes) if writes else 'none'}"
        )
    for label, spec in writes.items():
        target = _branch_target(f"stage {label!r}", label, spec.target, store)
        if store.targets.get(label):
            if publisher_class(target.format).has_folder_per_partition:
                check_placeholders(f"stage {label!r}", target.url, pipeline.partitions_def)
            if target.url == spec.target.url:
                raise PlanError(
                    f"stage {label!r}: targets names {target.url!r}, its target outside of "
                    "branches, which is published by `vane-dagster store promote`. Name another one"
                )
        pipeline = pipeline._with_spec(replace(spec, branch_target=target))
    return pipeline


def _branch_target(where: str, label: str, declared: Target, store: Store) -> Target:
    if url := store.targets.get(label):
        options = declared.storage_options or store.root.options_for(url)
        return replace(declared, url=url, storage_options=options)
    if declared.format in _WITHOUT_FOLDER:
        raise PlanError(
            f"{where}: a branch publishes below its root, {store.root.url!r}, and a table of "
            f"format {declared.format!r} is registered in a catalog. Name another table of the "
            f"catalog, as FragmentStore(targets={{{label!r}: ...}})"
        )
    folder = store.root.child(PUBLISHED, *label.split("/"))
    parts = declared.url.split("/")
    first = next((i for i, part in enumerate(parts) if PLACEHOLDER.search(part)), len(parts))
    url = "/".join([folder.url, *parts[first:]])
    return replace(declared, url=url, storage_options=folder.storage_options)
