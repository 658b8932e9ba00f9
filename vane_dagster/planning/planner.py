"""Planning: from a selection of stages and partitions, and the store's content, to a plan."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, replace
from typing import Any

import pyarrow as pa

from vane_dagster._secrets import masked
from vane_dagster._texts import EqualErrors, in_partition
from vane_dagster.errors import PlanError, SourceError, StoreError, VaneError, described
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.modules import files_read_once
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE, with_upstream
from vane_dagster.planning.branch_targets import with_branch_targets
from vane_dagster.planning.causes import (
    ALWAYS,
    FORCED,
    GIVEN_UP,
    INFERRED,
    LOST,
    RETRIED,
    UNPUBLISHED,
    Causes,
    causes,
)
from vane_dagster.planning.definition import (
    components,
    definition_digest,
    row_definition,
    superseded,
)
from vane_dagster.planning.fragment_keys import fragment_keys
from vane_dagster.planning.inputs import (
    agreed,
    not_materialized,
    stages_between,
    stages_read,
)
from vane_dagster.planning.plan import PartitionPlan, RunPlan, StagePlan
from vane_dagster.planning.source_code import keyed, source_definition
from vane_dagster.planning.source_warnings import left_out, mixed_types
from vane_dagster.planning.stored_parts import StoredParts
from vane_dagster.sources import FragmentRule, Listed
from vane_dagster.sources.base import Connect, default_rule
from vane_dagster.sources.files import file_identity, reconcile
from vane_dagster.sources.row_ids import with_ids
from vane_dagster.storage.adoptions import Adoptions, adoptions
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import (
    FIRST_GENERATION,
    Component,
    FileRecord,
    Manifest,
    ManifestName,
    generation_number,
    raised,
)
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.quarantine import failed_files, times_given_up
from vane_dagster.storage.store import Store


def plan_run(
    pipeline: Pipeline,
    selected: Collection[str],
    partitions: Sequence[str | None],
    store: Store,
    force: bool = False,
    run_id: str | None = None,
    retry_quarantined: bool = False,
    expand: bool = False,
    keep: bool = True,
    connect: Connect = lambda room: False,
) -> RunPlan:
    """Plan a run: find completed work by listings, and determine the remaining work."""
    listed_at = time.monotonic()
    partitions = [*map(pipeline._partition, partitions)]
    pipeline = with_branch_targets(pipeline, store, selected)
    order = tuple(stage.name for stage in pipeline if stage.name in selected)
    planner = _Planner(
        pipeline, order, store, force, run_id, retry_quarantined, expand, keep, connect
    )
    planner.look_up(partitions)
    outcomes = dict(zip(partitions, in_threads(planner.attempt, partitions)))
    warnings = EqualErrors()
    for key in dict.fromkeys([None, *partitions]):
        for text in planner.warnings[key]:
            warnings.add(key, text)
    planned = [each for each in outcomes.values() if isinstance(each, PartitionPlan)]
    if planner.heads and planned:
        unread = left_out(pipeline, planner.source, partitions)
        for text in (*unread, *mixed_types(pipeline, order, planned)):
            warnings.add(None, text)
    failed = {key: e for key, e in outcomes.items() if not isinstance(e, PartitionPlan)}
    return RunPlan(
        pipeline, order, planned, failed, planner.components, planner.rule, planner.source,
        warnings.texts(), listed_at, force, retry_quarantined, planner.files, planner.adopted,
        run_id, new_source=planner.new_source,
    )  # fmt: skip


def fragment_rule(pipeline: Pipeline, store: Store, keep: bool = True) -> FragmentRule:
    """Return the pipeline's own fragment rule, else the rule determined by its first run."""
    if pipeline.fragment_rows is not None:
        return FragmentRule(pipeline.fragment_rows)
    maps = [stage.spec for stage in pipeline if stage.spec.runs_udf]
    default = default_rule([spec.batch_size for spec in maps if spec.batch_size])
    limits = [rows for spec in maps if (rows := spec.max_fragment_rows)]
    rule = {"rows": min([default.rows, *limits]), "bytes": default.bytes}
    kept = store.fragment_rule(pipeline.name, rule, keep)
    return FragmentRule(int(kept["rows"]), int(kept["bytes"]))


@dataclass
class _Planner:
    """Plans the partitions of one run, each independently."""

    pipeline: Pipeline
    selected: tuple[str, ...]
    store: Store
    force: bool
    run_id: str | None
    retry: bool
    expand: bool
    keep: bool
    connect: InitVar[Connect]

    def __post_init__(self, connect: Connect) -> None:
        pipeline, store, selected = self.pipeline, self.store, self.selected
        self.location = f"pipeline {pipeline.name!r}"
        if self.keep:
            store.mark()
        # Before the definitions: an edit while these are computed then differs from what is here.
        self.files = {s: pipeline[s].spec.local_files() for s in selected}
        with files_read_once():
            self.components = {s: components(pipeline, pipeline[s].spec) for s in selected}
        self.definitions = {s: definition_digest(each) for s, each in self.components.items()}
        self.adopted = defaultdict[str, Adoptions](Adoptions)
        self.rule = fragment_rule(pipeline, store, self.keep)
        self.source = pipeline.source.bind(store).with_cluster(connect)
        self.source_definition = source_definition(self.source)
        ids = pipeline.id_rule.record if pipeline.id_rule else ""
        rules = (self.source_definition, self.source.splitting, ids)
        self.source_rules = [rule for rule in rules if rule]
        read = [u for s in selected for u in stages_read(pipeline, pipeline[s].spec)]
        self.inputs = [u for u in dict.fromkeys(read) if u not in selected]
        inferred = {s for s in selected if pipeline[s].spec.is_inferred}  # in a forecast
        self.with_schema = [s for s in selected if inferred.isdisjoint(with_upstream(pipeline, s))]
        self.between = {s: stages_between(pipeline, pipeline[s].spec) for s in selected}
        self.heads = [s for s in selected if SOURCE in pipeline[s].spec.upstream]
        self.latest: dict[str, dict[str | None, ManifestName]] = {}
        self.absent = defaultdict[str, Set[str | None]](set)  # partitions that targets lack
        self.listed: Mapping[str | None, Listed] = {}
        self._row_definitions = functools.cache(self._rows_of)
        self._failed_files = functools.cache(lambda s: failed_files(store, pipeline.name, s))
        self._condemned = functools.cache(lambda stage: store.condemned(pipeline.name, stage))
        self._fitting: list[tuple[str, pa.Schema]] = []
        self.warnings = defaultdict[str | None, list[str]](list)
        self.warnings[None] += superseded(pipeline, selected)
        last, described = store.source(pipeline.name), masked(pipeline.source.describe())
        self.new_source = None if last == described else described
        if last not in (None, described):
            self.warnings[None].append(
                f"{self.location}: its results in this store are of another source ({last}). If "
                "that is another pipeline, rename one of the two"
            )
        # How often a partition's stage was planned again, because a new part's key was taken.
        self.lost = Counter[tuple[str | None, str]]()
        self.names: dict[str, Sequence[str]] = {}

    def _name(self) -> None:
        """Determine what the keys of each stage's parts are made of; the first is for new ones."""
        for stage in self.selected:
            spec = self.pipeline[stage].spec
            copies = isinstance(spec, MapBatchesSpec) and bool(spec.key_columns(self.pipeline))
            names = self.adopted[stage].names(self.definitions[stage], copies)
            # A renamed stage is another one, as are those below it: its rows may differ this time.
            self.names[stage] = [digest(own, stage, *tail) for own, *tail in names]

    def look_up(self, partitions: Iterable[str | None]) -> None:
        """List the source files and the manifests in force."""
        keys = list(partitions)
        if self.heads:
            self.listed = self.source.list_files(keys, self.location)
        between = itertools.chain(*self.between.values())
        for stage in {*self.selected, *self.inputs, *between}:
            self.latest[stage] = self.store.latest(self.pipeline.name, stage, keys)
        for stage in self.selected:
            spec, made = self.pipeline[stage].spec, self.latest[stage]
            if spec.publishes and made:
                any_of_them = spec.publisher(next(iter(made)))
                try:
                    self.absent[stage] = made.keys() - {*any_of_them.present([*made])}
                except StoreError as error:  # a run that publishes needs it, and is refused
                    self.warnings[None].append(
                        f"cannot check whether published rows are still there: {error}"
                    )
        if any(self.pipeline[s].spec.runs_udf for s in self.selected):
            self.adopted = adoptions(self.store, self.pipeline.name)
        self._name()

    def attempt(self, key: str | None) -> PartitionPlan | VaneError:
        """Return a partition's plan, or the error that prevents it."""
        try:
            return self.plan(key)
        except VaneError as error:
            return error
        except Exception as error:  # e.g. an unreadable file; plan the other partitions
            return PlanError(f"{self.location}{in_partition(key)}: {described(error)}")

    def plan(self, key: str | None) -> PartitionPlan:
        input_names = {s: name for s in self.inputs if (name := self.latest[s].get(key))}
        if missing := [s for s in self.inputs if s not in input_names]:
            raise not_materialized(self.pipeline, self.selected, key, missing)
        files: tuple[FileRecord, ...] = ()
        if self.heads:
            files = self.source.required(self.listed[key], key, self.location)
        listed = {file.url: file for file in files}
        stages = self._digests(key, files, input_names)
        if self.heads and any(stages[head].done is None for head in self.heads):
            files = self._reconciled(key, files)
            stages = self._digests(key, files, input_names)
        if not self.expand and all(plan.done for plan in stages.values()):
            return PartitionPlan(key, stages, files, listed, input_names=input_names)
        return replace(self._expand(key, files, stages, input_names), listed=listed)

    def _digests(
        self,
        key: str | None,
        files: Sequence[FileRecord],
        inputs: Mapping[str, ManifestName],
    ) -> dict[str, StagePlan]:
        """Plan the stages by names alone.

        A stage is done if the manifest in force has the digest of its plan, by one of its names,
        and is published as a whole. Otherwise its parts are looked up in the generations of the
        attempts since then, the latest first.
        """
        known = {
            SOURCE: digest(
                self.rule.rows,
                self.rule.bytes,
                *(file_identity(file) for file in files),
                *self.source_rules,
            )
        }
        known |= {stage: name.plan for stage, name in inputs.items()}
        plans = {}
        for stage in self.selected:
            in_force = self.latest[stage].get(key)
            upstream = [known[u] for u in self.pipeline[stage].spec.upstream]
            # Once an adoption was undone, all parts of the stage are looked up again.
            given = (*self.adopted[stage].undone_names, *upstream)
            base = in_force.generation if in_force else FIRST_GENERATION
            made = self._plans(stage, base, given)
            is_done = in_force and in_force.plan in made and not in_force.unfinished
            is_done = is_done and self._is_published(key, stage)
            lost = self.lost[key, stage]
            given_up = 0 if is_done else self._times_given_up(key, stage, in_force)
            former = self._in_force(key, stage) if self.retry else None
            has_failed_rows = former is not None and any(part.faults for part in former.parts)
            forced = bool(self._forced_by(stage))
            again = forced or has_failed_rows
            attempts = _attempts(base, in_force, given_up + lost)
            if again or (self.retry and not is_done):
                own = _attempts(raised(base, self.run_id, again), in_force, lost)
                attempts = own if forced else [*own, *attempts]
            done = in_force if is_done and attempts[0] == base else None
            known[stage] = done.plan if done else self._plans(stage, attempts[0], given)[0]
            plans[stage] = StagePlan(
                digest=known[stage],
                generations=tuple(dict.fromkeys(attempts)),
                done=done,
                given_up=given_up + lost,
                former=in_force,
            )
        return plans

    def _times_given_up(self, key: str | None, stage: str, in_force: ManifestName | None) -> int:
        return times_given_up(self._failed_files(stage).get(partition_folder(key), ()), in_force)

    def _is_published(self, key: str | None, stage: str) -> bool:
        """Whether a target has what this store has published there of a stage, if anything."""
        spec, is_there = self.pipeline[stage].spec, key not in self.absent[stage]
        if not spec.publishes or (is_there and not self.store.fallback):
            return True
        if not (made := self._in_force(key, stage)) or made.root != self.store.root:
            return True  # a branch leaves alone what it has not published itself
        is_target = made.published and made.published.url == spec.publisher(key).target.url
        return bool(is_target) and (is_there or not made.published_files)

    def _plans(self, stage: str, generation: str, given: Sequence[str]) -> list[str]:
        """Return the digests that a plan of a stage has, by each of its names."""
        return [digest(name, generation, *given)[:32] for name in self.names[stage]]

    def _forced_by(self, stage: str) -> str:
        """Return why a stage is computed whatever the store holds; empty if it is not."""
        is_always = self.pipeline[stage].spec.reuse.mode == "none"
        return ALWAYS if is_always else FORCED if self.force else ""

    def _in_force(self, key: str | None, stage: str) -> Manifest | None:
        name = self.latest[stage].get(key)
        return None if name is None else self.store.read(self.pipeline.name, stage, key, name)

    def _reconciled(self, key: str | None, files: tuple[FileRecord, ...]) -> tuple[FileRecord, ...]:
        """Return the files; those touched but unchanged, as recorded by the manifests in force."""
        made = [self._in_force(key, stage) for stage in (*self.inputs, *self.heads)]
        before = (file for manifest in made if manifest for file in manifest.files)
        return reconcile(files, before, self.source)

    def _expand(
        self,
        key: str | None,
        files: tuple[FileRecord, ...],
        stages: Mapping[str, StagePlan],
        input_names: Mapping[str, ManifestName],
    ) -> PartitionPlan:
        store, name = self.store, self.pipeline.name
        inputs = {s: store.read(name, s, key, n) for s, n in input_names.items()}
        known = {s: manifest.schema for s, manifest in inputs.items()}
        fragments = None
        if self.heads:
            table = self.source.split(files, self.rule, self.location, key)
            self.warnings[key] += table.warnings
            table = with_ids(table, self.pipeline.id_rule, self.location)
            known[SOURCE] = table.schema
            fragments = keyed(table.fragments, self.source_definition)
        else:
            files = tuple({f.url: f for m in inputs.values() for f in m.files}.values())
        fragments = agreed(f"{self.location}{in_partition(key)}", fragments, inputs)
        if not fragments and not self.source.allow_empty:
            whose = "its source" if key is None else f"partition {key!r}"
            raise SourceError(
                f"{self.location}: the files of {whose} hold no rows. If that is expected, declare "
                "the source with allow_empty=True"
            )
        schemas = self.pipeline._resolve_schemas(self.with_schema, known)
        schemas |= self._published_schemas(key, stages, schemas)
        keys = {SOURCE: tuple(fragment.identity for fragment in fragments)}
        keys |= {s: tuple(part.key for part in m.parts) for s, m in inputs.items()}
        versions = {s: plan.digest for s, plan in stages.items()}
        versions |= {s: each.plan for s, each in input_names.items()}
        expanded: dict[str, StagePlan] = {}
        was_given_up = any(plan.given_up for plan in stages.values())
        for stage, plan in stages.items():
            above = self.pipeline[stage].spec.upstream
            upstream = [keys[u] for u in above]
            in_force, condemned = self._in_force(key, stage), self._condemned(stage)
            rows = self._row_definitions(stage, schemas.get(above[0]))
            names, generations = self.names[stage], plan.generations
            if self._forced_by(stage):  # not written under the name of another definition
                names = names[:1]
            elif in_force:
                generations = tuple(dict.fromkeys((*generations, *in_force.generations)))
            candidates = [fragment_keys(n, g, upstream) for g in generations for n in names]
            retry = self.retry or plan.given_up > self.lost[key, stage]
            try:
                stored = StoredParts(store, self.pipeline, stage, key, in_force, condemned)
                parts = stored.find(candidates, retry)
                searches = was_given_up and len(parts) < len(fragments)
                searches = searches and bool(rows.get("row_definition"))
                set_aside = stored.others(parts.values()) if searches else ()
            except StoreError as error:
                place = f"stage '{self.pipeline.name}/{stage}'{in_partition(key)}"
                raise StoreError(f"{place}: {error}") from error
            self.warnings[key] += stored.warnings
            if any(i not in parts and stored.has(own) for i, own in enumerate(candidates[0])):
                self.lost[key, stage] += 1  # what is computed gets other keys
                self.warnings[key].clear()
                return self.plan(key)
            keys[stage] = tuple(
                parts[i].info.key if i in parts else own for i, own in enumerate(candidates[0])
            )
            publisher = self.pipeline[stage].spec.publisher(key)
            there = [p for p in parts.values() if not publisher or p.folder == publisher.target]
            done = plan.done if len(there) == len(fragments) else None  # some parts were deleted
            if done is None:
                self._require_same_versions(stage, key, stages)
            why = Counter[str]()
            if not done:
                read = {u: versions[u] for u in self.pipeline[stage].spec.upstream if u != SOURCE}
                why = self._causes(stage, plan, in_force, files, read, schemas.get(stage, ()))
            expanded[stage] = replace(
                plan,
                causes=why,
                keys=keys[stage],
                parts=parts,
                done=done,
                set_aside=set_aside,
                generations=generations,
                row_floor=in_force.row_floor if in_force else 0,
                made_by=in_force.definition if in_force else "",
                **rows,
            )
        return PartitionPlan(key, expanded, files, {}, fragments, inputs, input_names, schemas)

    def _causes(
        self,
        stage: str,
        plan: StagePlan,
        in_force: Manifest | None,
        files: Sequence[FileRecord],
        read: Mapping[str, str],
        schema: Iterable[pa.Field],
    ) -> Causes:
        """Return why a stage is not up to date in a partition."""
        now: Sequence[Component] = self.components[stage]
        spec, why = self.pipeline[stage].spec, ""
        if in_force:
            if in_force.definition in self.adopted[stage].equals(self.definitions[stage]):
                now = in_force.components
            if generation_number(plan.generation) > generation_number(in_force.generation):
                why = self._forced_by(stage) or RETRIED
            elif self.lost[in_force.partition, stage]:
                why = LOST
            elif spec.publishes and in_force.plan == plan.digest:
                why = f"{UNPUBLISHED} {spec.published_in.url}"
        elif plan.given_up:
            why = GIVEN_UP
        undone = self.adopted[stage].undone_names
        found = causes(in_force, now, why, files, read, undone, schema)
        if spec.is_inferred and found.pop("option 'schema' changed", 0):  # in a forecast
            found[INFERRED] = 1
        return found

    def _require_same_versions(
        self, stage: str, key: str | None, stages: Mapping[str, StagePlan]
    ) -> None:
        """Verify that stages between that are not selected were made from what a stage reads."""
        between = self.between[stage]
        others = {s: self._in_force(key, s) for s in between if s not in stages}
        plans = {s: manifest.plan if manifest else "" for s, manifest in others.items()}
        plans |= {s: stages[s].digest for s in between if s in stages}
        for name, manifest in others.items():
            for upstream in {*self.pipeline[name].spec.upstream} & plans.keys():
                known = (
                    ManifestName.parse(manifest.upstream.get(upstream, "")) if manifest else None
                )
                if known is None or known.plan != plans[upstream]:
                    raise PlanError(
                        f"{self.location}{in_partition(key)}: {stage!r} reads records of stages "
                        f"upstream of {name!r}, which was materialized from another version of "
                        f"{upstream!r} and is not selected. Select it too"
                    )

    def _rows_of(self, stage: str, given: pa.Schema | None) -> dict[str, Any]:
        """Return what determines a stage's output for a row; empty if its rows have no keys."""
        spec = self.pipeline[stage].spec
        if not isinstance(spec, MapBatchesSpec) or given is None:
            return {}
        made = functools.partial(row_definition, self.pipeline, spec, given)
        if not (own := made(self.components[stage])):
            return {}
        equal, known = self.adopted[stage].equal_rows(own, made)
        return {"row_definition": own, "equal_rows": equal, "known_rows": known}

    def _published_schemas(
        self,
        key: str | None,
        stages: Mapping[str, StagePlan],
        schemas: Mapping[str, pa.Schema],
    ) -> dict[str, pa.Schema]:
        """Return the schemas in which `write` stages store rows, verified against their targets."""
        stored = dict[str, pa.Schema]()
        for stage, plan in stages.items():
            if stage in schemas and (publisher := self.pipeline[stage].spec.publisher(key)):
                location = f"stage '{self.pipeline.name}/{stage}'"
                stored[stage] = publisher.stored(schemas[stage], location)
                if plan.done is None and (stage, stored[stage]) not in self._fitting:
                    publisher.check(stored[stage], location)
                    self._fitting.append((stage, stored[stage]))
        return stored


def _attempts(generation: str, in_force: ManifestName | None, number: int) -> list[str]:
    """Return a generation after so many attempts since a manifest, and after fewer of them."""
    marks = [f"{in_force} {each}" for each in range(number, 0, -1)]
    return [*(raised(generation, mark, again=False) for mark in marks), generation]
