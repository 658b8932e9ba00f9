"""Where the `write` stages of a run in a branch store publish: never into the declared targets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from vane_dagster._arguments import PLACEHOLDER, check_placeholders
from vane_dagster.errors import PlanError, names
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.filesystem import absolute_url
from vane_dagster.storage.publish.registry import publisher_class
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.store import BRANCH, PUBLISHED, Store

_TABLE = "table"
"""The option of formats whose tables have a name in a catalog besides the folder of their files."""


def with_branch_targets(pipeline: Pipeline, store: Store, selected: Collection[str]) -> Pipeline:
    """Return the pipeline as its selected stages publish with a store."""
    if store.fallback is None:
        if (other := store.branch_of) is not None:
            raise PlanError(
                f"the store {store.root.url!r} is a branch. Open it as FragmentStore(root=..., "
                f"fallback={other!r}); or delete {store.root.file_url(BRANCH)!r} to "
                "make it an independent store that publishes into the declared targets"
            )
        return pipeline
    writes = {f"{pipeline.name}/{s.name}": s.spec for s in pipeline if s.spec.publishes}
    named = [each for each in store.targets if each.partition("/")[0] == pipeline.name]
    if unknown := [each for each in named if each not in writes]:
        raise PlanError(
            f"FragmentStore: targets has {names(unknown)}, but pipeline "
            f"{pipeline.name!r} has no such write stage; expected {names(writes)}"
        )
    for label, spec in writes.items():
        if spec.name in selected:
            target = _branch_target(label, spec.target, store)
            if publisher_class(target.format).has_folder_per_partition:
                check_placeholders(
                    f"stage {label!r}", target.url, pipeline.partitions_def, is_target=True
                )
            pipeline = pipeline._with_spec(replace(spec, branch_target=target))
    return pipeline


def _branch_target(label: str, declared: Target, store: Store) -> Target:
    given = store.targets.get(label)
    if _TABLE in declared.options:
        if given is None:
            raise PlanError(
                f"stage {label!r}: a branch publishes below its root, {store.root.url!r}, and a "
                f"table of format {declared.format!r} has a name in a catalog. Name another "
                f"table: FragmentStore(targets={{{label!r}: 'db.branch'}})"
            )
        target = _below(store, label, declared)
        target = replace(target, options={**declared.options, _TABLE: given})
        is_declared = given == declared.options[_TABLE]
    elif given is None:
        return _below(store, label, declared)
    else:
        url = absolute_url(given)
        options = declared.storage_options or store.root.options_for(url)
        target = replace(declared, url=url, storage_options=options)
        is_declared = url.rstrip("/") == declared.url.rstrip("/")
    if is_declared:
        raise PlanError(
            f"stage {label!r}: targets names {given!r}, which is the stage's target outside of "
            "branches; runs after `vane-dagster store promote` publish there. Name another one"
        )
    return target


def _below(store: Store, label: str, declared: Target) -> Target:
    """Return a target below the root of a store, with the placeholders of the declared one."""
    folder = store.root.child(PUBLISHED, *label.split("/"))
    parts = declared.url.split("/")
    first = next((i for i, part in enumerate(parts) if PLACEHOLDER.search(part)), len(parts))
    url = "/".join([folder.url, *parts[first:]])
    return replace(declared, url=url, storage_options=folder.storage_options)
