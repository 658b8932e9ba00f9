"""Adopts an edit that changes no result: stored rows stay in force under the new definition."""

from __future__ import annotations

import getpass
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vane_dagster._arguments import positive
from vane_dagster._secrets import errors_masked
from vane_dagster.checks.base import bound
from vane_dagster.checks.comparison import Difference, compare, described
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.inference import pinned
from vane_dagster.engine.recompute import delete_parts, read_sample
from vane_dagster.errors import DefinitionError, PlanError, SchemaError
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.orchestration.run import RunContext, recompute
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.definition import components, definition_digest
from vane_dagster.planning.sample_plan import plan_sample
from vane_dagster.storage.adoptions import Adoption, adoptions, keep_adoption, undo_adoption
from vane_dagster.storage.manifest import Component, Manifest
from vane_dagster.storage.reader import find_all
from vane_dagster.storage.store import Store

_ADOPTABLE = ("code", "argument")


def adopt(
    pipeline: Pipeline,
    stage: str,
    rows: int,
    tolerance: float,
    undo: bool,
    store: Any,
    compute: Any,
) -> Adoption:
    """Implement `Stage.adopt`."""
    location = f"stage '{pipeline.name}/{stage}': adopt"
    positive(location, "rows", rows)
    bound(location, "tolerance", tolerance)
    spec = pipeline[stage].spec
    if not spec.runs_udf:
        raise DefinitionError(
            f"{location}: it has no code of yours; its edits are quick to compute"
        )
    opened = open_store(store, location)
    with errors_masked():
        try:
            pipeline = pinned(pipeline, stage, opened)
        except SchemaError as error:
            raise PlanError(f"{location}: declare its schema, which is inferred") from error
        now = components(pipeline, pipeline[stage].spec)
        known = adoptions(opened, pipeline.name).of(stage, definition_digest(now))
        if undo:
            if known is None:
                raise PlanError(f"{location}: its definition was not adopted, or that was undone")
            undo_adoption(opened, pipeline.name, known)
            return known
        manifests = _former(location, opened, pipeline, stage, definition_digest(now), known)
        stored = next(iter(manifests.values()))
        changes = _changes(stored.components, now)
        kinds = {str(each): each.kind for each in (*stored.components, *now)}
        # Other edits decide about rows which a sample may not have.
        if others := [change for change in changes if kinds[change] not in _ADOPTABLE]:
            raise PlanError(
                f"{location}: {', '.join(others)} changed, and only edits of code and of "
                "arguments are adopted. Materialize the stage"
            )
        seed = secrets.randbits(32)
        weights = [sum(part.rows_in for part in each.parts) for each in manifests.values()]
        if not sum(weights):
            raise PlanError(f"{location}: there is no stored row to compare with; materialize it")
        most = min(rows, sum(weights))
        counts = Counter(random.Random(seed).sample([*manifests], most, counts=weights))
        compared = _compare(
            location, pipeline, stage, manifests, counts, opened, compute, tolerance, seed, now
        )
        adoption = Adoption(
            stage=stage,
            definition=definition_digest(now),
            stored=stored.definition,
            components=stored.components,
            changes=changes,
            rows=compared,
            partitions=len(counts),
            tolerance=tolerance,
            seed=seed,
            user=getpass.getuser(),
            at=time.time(),
        )
        keep_adoption(opened, pipeline.name, adoption)
    return adoption


def _former(
    location: str,
    store: Store,
    pipeline: Pipeline,
    stage: str,
    definition: str,
    known: Adoption | None,
) -> Mapping[str | None, Manifest]:
    """Return the manifests of all partitions, which must be of one other definition."""
    found = find_all(store, pipeline[stage].key.path, None)
    definitions = {each.definition for each in found.values()}
    if definitions == {known.stored if known else definition}:
        raise PlanError(f"{location}: all stored partitions are of the present definition")
    if len(definitions) > 1:
        raise PlanError(
            f"{location}: the stored partitions are of {len(definitions)} definitions, and only "
            "edits are adopted by which no partition was computed yet. Materialize it"
        )
    return found


def _changes(before: Sequence[Component], now: Sequence[Component]) -> list[str]:
    """Return what was edited, added or removed."""
    then, today = ({str(each): each.digest for each in some} for some in (before, now))
    return [name for name in {**today, **then} if then.get(name) != today.get(name)]


def _compare(
    location: str,
    pipeline: Pipeline,
    stage: str,
    manifests: Mapping[str | None, Manifest],
    counts: Mapping[str | None, int],
    store: Store,
    compute: Any,
    tolerance: float,
    seed: int,
    now: Sequence[Component],
) -> int:
    """Compute some stored rows again; return their number, or raise if one differs."""
    chosen = {key: manifests[key] for key in counts}
    sample = plan_sample(pipeline, stage, chosen, store, counts, seed, max(counts.values()))
    plan = replace(sample.plan, components={stage: now})  # an edit meanwhile is then an error
    run = RunContext(store, f"adopt-{secrets.token_hex(4)}", CheckRunner(pipeline, store))
    differences: list[Difference] = []
    compared = 0
    try:
        for partition in plan.partitions:
            if partition.schemas[stage] != manifests[partition.key].schema:
                raise PlanError(f"{location}: the types of its columns changed. Materialize it")
        results = recompute(run, plan, LocalCompute() if compute is None else compute)
        for error in results.failed.values():
            raise PlanError(f"{location}: stored rows cannot be computed again: {error}")
        for partition in plan.partitions:
            key = partition.key
            for each in read_sample(plan, partition, sample.sampled[key], results.made[key], store):
                compared += sum(id not in each.stored.failed for id in each.ids)
                differences += compare(each.stored, each.computed, each.ids, None, tolerance)
    finally:
        delete_parts(plan, store)
    if differences:
        raise PlanError(
            f"{location}: nothing was adopted: {described(differences, compared, 'stored rows')}. "
            f"The first was {differences[0].before} and is {differences[0].now}"
        )
    if not compared:
        raise PlanError(f"{location}: there is no stored row to compare with; materialize it")
    return compared
