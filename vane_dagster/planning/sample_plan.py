"""Plans that recompute a sample of the rows that a stage was computed from.

The plan reads what the manifest records as the partition's inputs: its fragments and the parts of
its upstream stages, even if newer ones exist. It is executed like any other plan, except that its
parts are not committed; see `PartitionPlan.sample`.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

import numpy as np

from vane_dagster._texts import in_partition
from vane_dagster.errors import PlanError, SourceError, VaneError, names
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.definition import components
from vane_dagster.planning.inputs import agreed, stages_read
from vane_dagster.planning.plan import PartitionPlan, RunPlan, StagePlan
from vane_dagster.planning.planner import fragment_rule
from vane_dagster.planning.source_code import keyed, source_definition
from vane_dagster.sources import FragmentRule, Listed, Source
from vane_dagster.sources.files import file_version, reconcile
from vane_dagster.sources.row_ids import with_ids
from vane_dagster.storage.manifest import FileRecord, FragmentRecord, Manifest, ManifestName
from vane_dagster.storage.store import Store

MAX_FRAGMENTS = 4
"""Fragments of a partition in the sample of a check, since each is read as a whole."""


K = TypeVar("K")


@dataclass(frozen=True)
class SamplePlan:
    """A plan of samples, and their origin.

    Attributes:
        plan: The plan; a partition without a row to compute is not in it.
        stored: The manifests of its partitions, with only the parts of the sampled fragments.
        changed: Partitions that cannot be compared because their source files have changed.
    """

    plan: RunPlan
    stored: Mapping[str | None, Manifest]
    changed: Collection[str | None]


def plan_sample(
    pipeline: Pipeline,
    stage: str,
    manifests: Mapping[str | None, Manifest],
    store: Store,
    rows: Mapping[str | None, int],
    seed: int,
    fragments: int = MAX_FRAGMENTS,
) -> SamplePlan:
    """Plan to recompute some rows of a stage, of at most `fragments` fragments a partition."""
    manifests = {pipeline._partition(key): each for key, each in manifests.items()}
    source, rule = pipeline.source.bind(store), fragment_rule(pipeline, store)
    listed: Mapping[str | None, Listed] = {}
    if SOURCE in pipeline[stage].spec.upstream:
        location = f"pipeline {pipeline.name!r}"
        listed = source.list_files(list(manifests), location)
    planned: list[PartitionPlan] = []
    stored: dict[str | None, Manifest] = {}
    changed = set[str | None]()
    failed: dict[str | None, VaneError] = {}
    for key, manifest in manifests.items():
        made = replace(manifest, partition=key)
        planner = _Sampler(pipeline, stage, made, store, source, rule, listed.get(key, ()))
        try:
            sampled = planner.plan(rows[key], partition_seed(seed, key), fragments)
        except VaneError as error:
            failed[key] = error
            continue
        if sampled is None:
            changed.add(key)
        elif sampled[0].fragments:
            planned.append(sampled[0])
            stored[key] = sampled[1]
    files = {stage: pipeline[stage].spec.local_files()}
    present = {stage: components(pipeline, pipeline[stage].spec)}
    plan = RunPlan(
        pipeline, (stage,), planned, failed, present, rule, source, listed_at=time.monotonic(),
        files=files,
    )  # fmt: skip
    return SamplePlan(plan, stored, changed)


def spread(rows: Mapping[K, int], most: int | None, seed: int) -> Counter[K]:
    """Draw so many of the rows of all partitions or fragments, or all; return their numbers."""
    total = sum(rows.values())
    drawn = total if most is None else min(most, total)
    return Counter(Random(seed).sample([*rows], drawn, counts=[*rows.values()]) if total else ())


def partition_seed(seed: int, partition: str | None) -> int:
    """Return the seed of a partition, so that not the same rows are chosen in each."""
    return seed if partition is None else zlib.crc32(f"{seed} {partition}".encode())


def choose(
    counts: Mapping[int, int], rows: int, seed: int, fragments: int = MAX_FRAGMENTS
) -> dict[int, tuple[int, ...]]:
    """Choose rows at random, from at most so many fragments."""
    random = np.random.default_rng(seed)
    filled = [index for index, count in counts.items() if count]
    if not filled:
        return {}
    shares = np.array([counts[index] for index in filled], float)
    few = random.choice(filled, min(len(filled), fragments), replace=False, p=shares / shares.sum())
    drawn = spread({index: counts[index] for index in sorted(few.tolist())}, rows, seed)
    places = {i: random.choice(counts[i], number, replace=False) for i, number in drawn.items()}
    return {i: tuple(np.sort(places[i]).tolist()) for i in sorted(places)}


@dataclass(frozen=True)
class _Sampler:
    """Plans the sample of one partition."""

    _pipeline: Pipeline
    _stage: str
    _manifest: Manifest
    _store: Store
    _source: Source
    _rule: FragmentRule
    _listed: Listed

    @property
    def _spec(self) -> StageSpec:
        return self._pipeline[self._stage].spec

    @property
    def _location(self) -> str:
        where = in_partition(self._manifest.partition)
        return f"stage '{self._pipeline.name}/{self._stage}'{where}"

    def plan(self, rows: int, seed: int, most: int) -> tuple[PartitionPlan, Manifest] | None:
        """Return the plan and its part of the manifest; None if source files have changed."""
        manifest, stage, key = self._manifest, self._stage, self._manifest.partition
        keys = self._pipeline._key_columns(stage)
        if manifest.keys and tuple(manifest.keys) != keys:
            raise PlanError(
                f"{self._location}: its rows are identified by {names(manifest.keys)} in the "
                f"store but by {names(keys)} now. Materialize it first"
            )
        inputs = self._inputs()
        listed: Mapping[str, FileRecord] = {}
        if reads_source := SOURCE in self._spec.upstream:
            listed = self._unchanged()
            if any(file.url not in listed for file in manifest.files):
                return None
        base = self._spec.base_node(self._pipeline)
        counts = {
            index: each.rows if base == SOURCE else inputs[base].parts[index].rows
            for index, each in enumerate(manifest.fragments)
        }
        chosen = choose(counts, rows, seed, most)
        known = {stage: manifest.schema for stage, manifest in inputs.items()}
        recorded: Sequence[FragmentRecord] = manifest.fragments
        if chosen and reads_source:
            # All files: the sampled files alone may have fewer columns or narrower types.
            table = self._source.split(list(listed.values()), self._rule, self._location, key)
            table = with_ids(table, self._pipeline.id_rule, self._location)
            known[SOURCE] = table.schema
            # `split` has converted again what garbage collection had deleted.
            present = keyed(table.fragments, source_definition(self._source))
            by_identity = {each.identity: each for each in present}
            recorded = [by_identity.get(each.identity, each) for each in recorded]
        schemas = self._pipeline._resolve_schemas([stage], known) if chosen else {}
        fragments = tuple(recorded[i] for i in chosen)
        few = {s: replace(m, parts=[m.parts[i] for i in chosen]) for s, m in inputs.items()}
        own_keys = tuple(secrets.token_hex(20) for _ in chosen)  # no other plan finds these parts
        plan = PartitionPlan(
            key=key,
            files=tuple(manifest.files),
            listed=listed,
            fragments=fragments,
            stages={stage: StagePlan(manifest.plan, (manifest.generation,), None, own_keys)},
            inputs=few,
            schemas=schemas,
            sample=dict(enumerate(chosen.values())),
        )
        parts = [manifest.parts[i] for i in chosen]
        return plan, replace(manifest, parts=parts, fragments=fragments)

    def _inputs(self) -> dict[str, Manifest]:
        """Return the manifests that the partition was made from, of the stages now read."""
        wanted = stages_read(self._pipeline, self._spec)
        manifests: dict[str, Manifest] = {}
        pairs = [(self._spec, self._manifest)]
        while pairs and not all(stage in manifests for stage in wanted):
            spec, manifest = pairs.pop(0)
            for stage in spec.upstream:
                name = ManifestName.parse(manifest.upstream.get(stage, ""))
                if stage in manifests or name is None:
                    continue
                key = self._manifest.partition
                manifests[stage] = self._store.read(self._pipeline.name, stage, key, name)
                pairs.append((self._pipeline[stage].spec, manifests[stage]))
        if missing := [stage for stage in wanted if stage not in manifests]:
            raise PlanError(
                f"{self._location}: the stage reads {names(missing)} now, which the partition was "
                "not made from. Materialize it first"
            )
        inputs = {stage: manifests[stage] for stage in wanted}
        agreed(self._location, tuple(self._manifest.fragments), inputs)
        return inputs

    def _unchanged(self) -> dict[str, FileRecord]:
        """Return the source files, as listed now, that have not changed."""
        recorded = {file.url: file for file in self._manifest.files}
        if not recorded and self._manifest.fragments:
            raise PlanError(
                f"{self._location}: the stage reads the source now, which the partition was not "
                "made from. Materialize it first"
            )
        if isinstance(self._listed, SourceError):  # the files are gone
            return {}
        same = reconcile(self._listed, recorded.values(), self._source)
        return {
            file.url: file
            for file, kept in zip(self._listed, same)
            if file.url in recorded and file_version(kept) == file_version(recorded[file.url])
        }
