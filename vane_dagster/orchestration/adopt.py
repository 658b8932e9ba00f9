"""Adopts an edit that changes no result: stored rows stay in force under the new definition."""

from __future__ import annotations

import getpass
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster._arguments import positive
from vane_dagster._secrets import errors_masked
from vane_dagster.checks.base import bound
from vane_dagster.checks.comparison import Difference, compare, described
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.inference import pinned
from vane_dagster.engine.recompute import delete_parts, read_sample
from vane_dagster.errors import DefinitionError, PlanError
from vane_dagster.events import Event, Failed, Recomputed
from vane_dagster.orchestration.read import open_store
from vane_dagster.orchestration.resources import LocalCompute
from vane_dagster.orchestration.run import RunContext, recompute
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.causes import edits
from vane_dagster.planning.definition import components, definition_digest
from vane_dagster.planning.plan import Part
from vane_dagster.planning.sample_plan import plan_sample
from vane_dagster.storage.adoptions import Adoption, keep_adoption
from vane_dagster.storage.manifest import Component, Manifest
from vane_dagster.storage.reader import find_all
from vane_dagster.storage.store import Store

_MAX_PARTITIONS = 8
_MAX_FRAGMENTS = 25
_ADOPTABLE = ("code", "argument")


def adopt(
    pipeline: Pipeline, stage: str, rows: int, tolerance: float, store: Any, compute: Any
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
        pipeline = pinned(pipeline, stage, opened)
        now = components(pipeline, pipeline[stage].spec)
        manifests = _former(location, opened, pipeline, stage, definition_digest(now))
        stored = next(iter(manifests.values()))
        changes = list(edits(stored.components, now))
        _require_adoptable(location, stored.components, now, changes)
        seed = secrets.randbits(32)
        keys = random.Random(seed).sample([*manifests], min(len(manifests), _MAX_PARTITIONS))
        sample = {key: manifests[key] for key in keys}
        compared = _compare(
            location, pipeline, stage, sample, opened, compute, rows, tolerance, seed
        )
        if components(pipeline, pipeline[stage].spec) != now:
            raise PlanError(f"{location}: the code was edited meanwhile; adopt it again")
        adoption = Adoption(
            stage=stage,
            definition=definition_digest(now),
            stored=stored.definition,
            components=stored.components,
            changes=changes,
            rows=compared,
            partitions=len(sample),
            tolerance=tolerance,
            seed=seed,
            user=getpass.getuser(),
            at=time.time(),
        )
        keep_adoption(opened, pipeline.name, adoption)
    return adoption


def _former(
    location: str, store: Store, pipeline: Pipeline, stage: str, definition: str
) -> Mapping[str | None, Manifest]:
    """Return the manifests of the former definition that most partitions have."""
    found = find_all(store, pipeline[stage].key.path, None)
    counts = Counter(each.definition for each in found.values() if each.definition != definition)
    if not counts:
        raise PlanError(f"{location}: all stored partitions are of the present definition")
    ((former, _),) = counts.most_common(1)
    return {key: each for key, each in found.items() if each.definition == former}


def _require_adoptable(
    location: str, before: Sequence[Component], now: Sequence[Component], changes: Sequence[str]
) -> None:
    """Refuse changes that decide about rows which a sample may not have."""
    kinds = {str(each): each.kind for each in (*before, *now)}
    if others := [change for change in changes if kinds[change] not in _ADOPTABLE]:
        raise PlanError(
            f"{location}: {', '.join(others)} changed, and only edits of code and of arguments are "
            "adopted. Materialize the stage"
        )


@dataclass
class _Results:
    """What came of a sample."""

    made: dict[str | None, Sequence[Part]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def listen(self, event: Event) -> None:
        if isinstance(event, Recomputed):
            self.made[event.partition] = event.parts
        elif isinstance(event, Failed):
            self.failed.append(str(event.error))


def _compare(
    location: str,
    pipeline: Pipeline,
    stage: str,
    manifests: Mapping[str | None, Manifest],
    store: Store,
    compute: Any,
    rows: int,
    tolerance: float,
    seed: int,
) -> int:
    """Compute some stored rows again; return their number, or raise if one differs."""
    share = -(-rows // len(manifests))
    sample = plan_sample(pipeline, stage, manifests, store, share, seed, _MAX_FRAGMENTS)
    results = _Results(failed=[str(error) for error in sample.plan.failed.values()])
    run_id = f"adopt-{secrets.token_hex(4)}"
    run = RunContext(store, run_id, CheckRunner(pipeline, store), results.listen)
    differences: list[Difference] = []
    compared = 0
    try:
        for partition in sample.plan.partitions:
            if partition.schemas[stage] != manifests[partition.key].schema:
                raise PlanError(f"{location}: the types of its columns changed. Materialize it")
        if sample.plan.partitions:
            recompute(run, sample.plan, LocalCompute() if compute is None else compute)
        if results.failed:
            raise PlanError(
                f"{location}: stored rows cannot be computed again: {results.failed[0]}"
            )
        for partition in sample.plan.partitions:
            key = partition.key
            made = results.made[key]
            for each in read_sample(sample.plan, partition, sample.sampled[key], made, store):
                compared += len(each.ids)
                differences += compare(each.stored, each.computed, each.ids, None, tolerance)
    finally:
        delete_parts(sample.plan, store)
    if differences:
        raise PlanError(
            f"{location}: nothing was adopted: {described(differences, compared, 'stored rows')}. "
            f"The first was {differences[0].before} and is {differences[0].now}"
        )
    if not compared:
        raise PlanError(f"{location}: there is no stored row to compare with; materialize it")
    return compared
