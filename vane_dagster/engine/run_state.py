"""State of a run's partitions: parts, failures, counts, and commits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from vane_dagster.checks.builtin import ErrorRate, findings_of
from vane_dagster.checks.compared import Compared
from vane_dagster.compute.work_claims import Claims
from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.engine.committer import Commit, Committer, WithheldError
from vane_dagster.engine.figures import computation_figures
from vane_dagster.engine.pending_rows import PendingRows
from vane_dagster.engine.pool_usage import PoolUsage
from vane_dagster.engine.renamed_stages import RenamedStages
from vane_dagster.engine.token_budget import TokenBudget
from vane_dagster.errors import FailedRowsError, StoreError, VaneError
from vane_dagster.events import (
    Committed,
    Event,
    Failed,
    Noticed,
    Recomputed,
    StageStats,
    Unchanged,
)
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.plan import Part, PartitionPlan, RunPlan
from vane_dagster.planning.stored_parts import StoredParts
from vane_dagster.sources.files import content_hash
from vane_dagster.sources.parquet import PARQUET
from vane_dagster.storage.batch_records import Recorded
from vane_dagster.storage.filesystem import protocol_of
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.quarantine import write_failed
from vane_dagster.storage.row_floor import raise_epoch, read_epoch
from vane_dagster.storage.store import Store
from vane_dagster.worker.pools import PoolSpec

_PUBLISH_POLL_SECONDS = 0.2
_FAILED_ROWS_KEPT = 100


class RunState:
    """The state of a run over all its waves. Used only by the executor's thread."""

    def __init__(
        self,
        plan: RunPlan,
        store: Store,
        run_id: str,
        emit: Callable[[Event], None],
        check_runner: CheckRunner,
        claims: Claims | None = None,
        pools: Mapping[str, PoolSpec] | None = None,
        used: dict[str, Counter[str]] | None = None,
    ) -> None:
        self.plan = plan
        self.pipeline = plan.pipeline
        self.run_id = run_id
        self.emit = emit
        self.store = store
        self._check_runner = check_runner
        self.renamed = RenamedStages(plan, store, self.searched, emit)
        self._nearest = functools.cache(lambda k, n: [*itertools.islice(check_runner.before(k), n)])
        self._failed_rows: dict[tuple[int, str], list[pa.Table]] = defaultdict(list)
        self._samples: dict[tuple[int, str], Sequence[Mapping[str, str]]] = {}
        self.claims = claims or Claims()
        hash_file = functools.partial(content_hash, source=plan.source)
        self._committer = Committer(
            store, hash_file, self._publishing, check_runner.results, in_order=bool(self._before)
        )
        self._queued: set[tuple[int, str]] = set()
        self.token_budget = TokenBudget(plan.pipeline, used)
        self.pending = PendingRows(plan, store, plan.origin or run_id, emit)
        self.failed: dict[tuple[int, str], VaneError] = {}
        self.damaged: dict[tuple[int, int], VaneError] = {}  # fragments with removed parts
        self.parts: dict[tuple[int, str], dict[int, Part]] = {}
        self.stats: dict[tuple[int, str], StageStats] = {}
        self.epochs: dict[str, int] = {}  # of the stages with row keys to compute
        self.usage = PoolUsage()
        self._max_faults = functools.cache(self._most_faults)
        self._servers = {s: tuple(pool.uses.values()) for s, pool in (pools or {}).items()}
        for index, partition in enumerate(plan.partitions):
            for stage, stage_plan in partition.stages.items():
                self.parts[index, stage] = {}
                for i, part in stage_plan.parts.items():
                    self._take(index, stage, i, part)
                parts = stage_plan.parts.values()
                faults = sum(part.info.quarantined + part.info.nulled for part in parts)
                self.stats[index, stage] = StageStats(faults=faults)
            for stage, manifest in partition.inputs.items():
                folder = store.parts_of(manifest)
                self.parts[index, stage] = {
                    i: Part(folder, part) for i, part in enumerate(manifest.parts)
                }

    def fragments_left(self, stages: Sequence[str]) -> dict[int, list[int]]:
        """The fragments with at least one stage that is left to compute, by partition."""
        left = {}
        for index, partition in enumerate(self.plan.partitions):
            due, fragments = self.due(index, stages), range(len(partition.fragments))
            left[index] = [i for i in fragments if any(self.is_left(index, s, i) for s in due)]
        return {index: fragments for index, fragments in left.items() if fragments}

    def due(self, index: int, stages: Sequence[str]) -> list[str]:
        """The stages of a partition that lack parts and were not given up."""
        planned, failed = self.plan.partitions[index], self.failed
        lacking = (s for s in stages if len(self.parts[index, s]) < len(planned.fragments))
        return [s for s in lacking if not planned.stages[s].done and (index, s) not in failed]

    def is_left(self, index: int, stage: str, fragment: int) -> bool:
        """Whether a stage that is due lacks a part of a fragment, which was not given up."""
        given_up = (index, fragment) in self.damaged or self.pending.has(index, stage, fragment)
        return not given_up and fragment not in self.parts[index, stage]

    def begin(self) -> None:
        """Report completed partitions, and commit those that lack only a manifest."""
        if self.plan.new_source and self.plan.partitions and not self.plan.is_sample:
            with contextlib.suppress(StoreError):  # it may be read-only: all may be up to date
                self.store.keep_source(self.pipeline.name, self.plan.new_source)
        for stage in self.plan.needed():
            spec = self.pipeline[stage].spec
            partitions = self.plan.partitions
            # A forced stage may have rows of a time when it reused them.
            is_forced = self.plan.forced and spec.runs_udf
            if is_forced or any(partition.stages[stage].row_definition for partition in partitions):
                place = self.store, self.pipeline.name, stage
                if self.plan.forced:
                    self.epochs[stage] = raise_epoch(*place, self.plan.origin or self.run_id)
                else:
                    self.epochs[stage] = read_epoch(*place)
            if spec.publishes:
                target = spec.branch_target or spec.target
                self.store.keep_target(self.pipeline.name, stage, target.url)
        for partition in self.plan.partitions:
            if partition.fragments and not partition.is_sample:
                self._committer.hash_ahead(partition.files)
            for stage, stage_plan in partition.stages.items():
                if stage_plan.done:
                    self.emit(Unchanged(stage, partition.key, stage_plan.done))
        for index in range(len(self.plan.partitions)):
            self._commit_complete(index)

    def add_part(self, index: int, stage: str, fragment: int, part: Part) -> None:
        """Add a part, and commit the partitions that it completes."""
        self._take(index, stage, fragment, part)
        if not self.plan.is_sample:
            self._committer.sync_ahead(part)
        self._commit_complete(index)

    def _take(self, index: int, stage: str, fragment: int, part: Part) -> None:
        """Store a part, and the first sample, which is meant for people."""
        if part.info.sample:
            self._samples.setdefault((index, stage), part.info.sample)
            part = replace(part, info=replace(part.info, sample=()))
        self.parts[index, stage][fragment] = part

    def row_floor(self, index: int, stage: str) -> int | None:
        """Return the epoch before which rows are not copied into a partition; None if unknown.

        A renamed stage keeps that which the partition had under its former name.
        """
        partition = self.plan.partitions[index]
        planned, epoch = partition.stages[stage], self.epochs.get(stage)
        if self.plan.forced:
            return epoch
        floor = planned.row_floor
        if planned.former is None and planned.row_definition:
            renamed = self.renamed.in_force(stage, partition.key, planned.known_rows)
            if renamed is not None:
                floor = renamed.row_floor
                epoch = read_epoch(self.store, self.pipeline.name, renamed.stage)
        return epoch if floor is None else floor

    def searched(self, index: int, stage: str) -> Sequence[str]:
        """The partitions before one, in which a stage looks rows up, the nearest first."""
        spec, key = self.pipeline[stage].spec, self.plan.partitions[index].key
        if not spec.runs_udf or not spec.reuse.partitions or self.plan.forced or key is None:
            return ()
        return self._nearest(key, spec.reuse.partitions)

    def look_up(self, index: int, stages: Sequence[str]) -> dict[str, dict[int, Part]]:
        """List the parts of a partition that the run does not know, by stage, from any thread."""
        partition, stored = self.plan.partitions[index], {}
        for stage in (s for s in stages if not partition.stages[s].done):
            manifest = self.store.in_force(self.pipeline.name, stage, partition.key)
            condemned = self.store.condemned(self.pipeline.name, stage)
            place = self.store, self.pipeline, stage, partition.key
            parts, known = StoredParts(*place, manifest, condemned), self.parts[index, stage]
            stored[stage] = parts.find([partition.stages[stage].keys], known=known)
            for text in parts.warnings:
                self.emit(Noticed(text))
        return stored

    def add_failed_rows(self, index: int, stage: str, rows: pa.Table) -> None:
        """Keep the first failed rows of a partition, in case it is not committed."""
        kept = self._failed_rows[index, stage]
        if sum(map(len, kept)) < _FAILED_ROWS_KEPT:
            kept.append(rows)

    def fail(self, index: int, stage: str, error: VaneError) -> set[str]:
        """Give up a stage of a partition and the selected stages downstream."""
        lost = self.plan.with_downstream(stage)
        key = self.plan.partitions[index].key
        self._keep_failed_rows(index, stage, error)
        for name in self.plan.selected:
            if name in lost and (index, name) not in self.failed:
                self.failed[index, name] = error
                self.emit(Failed(name, key, error, None if name == stage else stage))
        self._commit_complete(index)
        return lost

    def _keep_failed_rows(self, index: int, stage: str, error: VaneError) -> None:
        """Store the failed rows of a partition that is given up."""
        rows, partition = self._failed_rows.pop((index, stage), []), self.plan.partitions[index]
        too_many = isinstance(error, FailedRowsError)
        parts = self.parts[index, stage].values() if too_many else ()
        stored = [part for part in parts if part.info.faults]
        if (rows or stored) and not partition.is_sample:
            plan, place = partition.stages[stage], (self.store, self.pipeline.name, stage)
            number = plan.given_up + too_many
            with contextlib.suppress(StoreError):  # the error has some of them
                rows = rows or [read_part(stored[0].folder, stored[0].info.faults)]
                write_failed(*place, partition.key, plan.former, number, rows)

    def pend(self, index: int, stage: str, fragment: int, recorded: Sequence[Recorded]) -> set[str]:
        """Give up a stage and those downstream of it for a fragment that waits for batches."""
        waiting = self.pending.add(index, stage, fragment, recorded)
        self._commit_complete(index)
        return waiting

    def submit(self) -> None:
        """Submit the requests of this run, and report the partitions that wait for batches."""
        for (index, stage), error in self.pending.submit(self.failed).items():
            self.fail(index, stage, error)

    def fail_damaged(self) -> None:
        """Fail the partitions with removed parts."""
        for (index, _), error in self.damaged.items():
            for stage in self.plan.partitions[index].stages:
                if not self._is_settled(index, stage):
                    self.fail(index, stage, error)

    def _is_settled(self, index: int, stage: str) -> bool:
        """Whether a stage of a partition is committed, queued for commit, failed or pending."""
        done, place = self.plan.partitions[index].stages[stage].done, (index, stage)
        settled = (self._queued, self.failed, self.pending)
        return done is not None or any(place in each for each in settled)

    def faults_allowed(self, index: int, stage: str) -> int:
        """Rows of a stage's partition that may still fail before a call gives the partition up."""
        return max(0, self._max_faults(index, stage) - self.stats[index, stage].faults)

    def _most_faults(self, index: int, stage: str) -> int:
        """Rows of a stage's partition that may fail.

        The stage's blocking checks `ErrorRate` set it. This early limit assumes as many rows as the
        source has. Below a fan-out there may be more, so there it has no bound: the check decides
        when all rows are computed. A sample has no bound either, because failed rows are shown.
        """
        partition = self.plan.partitions[index]
        base = self.pipeline[stage].spec.base_node(self.pipeline)
        if partition.is_sample or len(self.pipeline._keys_of(base)) > 1:
            return sys.maxsize
        checks = findings_of(self.pipeline._checks_of(stage))
        limits = (
            c.allowed(partition.source_rows)
            for c in checks
            if isinstance(c, ErrorRate) and c.blocking
        )
        return min(limits, default=sys.maxsize)

    def close(self) -> None:
        """Wait until all commits are done."""
        self._committer.close()

    def _commit_complete(self, index: int) -> None:
        """Commit what is complete of a partition, and of those that are compared with it.

        The latter may wait for a stage that this one does not commit.
        """
        waiting = [*self._compared_with.get(index, ()), index]
        while waiting:
            if self._commits_some(index := waiting.pop()):
                waiting += self._compared_with.get(index, ())

    @functools.cached_property
    def _before(self) -> Mapping[int, int]:
        """The partition that each one is compared with, by index; empty without such checks."""
        preceding: dict[int, int] = {}
        checks = itertools.chain(*map(self.pipeline._checks_of, self.plan.selected))
        if any(check.compares for check in checks):
            indexes = {partition.key: i for i, partition in enumerate(self.plan.partitions)}
            for key, index in indexes.items():
                earlier = self._check_runner.earlier(key)
                if (other := next((k for k in earlier if k in indexes), None)) is not None:
                    preceding[index] = indexes[other]
        return preceding

    @functools.cached_property
    def _compared_with(self) -> Mapping[int, Sequence[int]]:
        """The partitions that are compared with each one, by index."""
        compared = defaultdict[int, list[int]](list)
        for later, before in self._before.items():
            compared[before].append(later)
        return compared

    def _commits_some(self, index: int) -> bool:
        partition, before = self.plan.partitions[index], len(self._queued)
        for stage in partition.stages:
            if self._is_settled(index, stage):
                continue
            above = [u for u in self.pipeline[stage].spec.upstream if u in partition.stages]
            ready = all(partition.stages[u].done or (index, u) in self._queued for u in above)
            if ready and len(self.parts[index, stage]) == len(partition.fragments):
                if not partition.is_sample and self._waits_for_compared(index, stage):
                    continue
                self._queued.add((index, stage))
                self._failed_rows.pop((index, stage), None)
                if partition.is_sample:
                    made = tuple(part for _, part in sorted(self.parts[index, stage].items()))
                    self.emit(Recomputed(stage, partition.key, made))
                    continue
                self._committer.put(self._commit(index, partition, stage))
        return len(self._queued) > before

    def _waits_for_compared(self, index: int, stage: str) -> bool:
        """Whether a check compares with the previous partition or a stage, not committed yet."""
        checks, stages = self.pipeline._checks_of(stage), self.plan.partitions[index].stages
        others = {c.stage_of(self.pipeline.name) for c in checks if isinstance(c, Compared)}
        before = itertools.takewhile(stage.__ne__, stages)  # so that none waits for another in turn
        places = [(index, other) for other in before if other in others]
        if index in self._before and any(check.compares for check in checks):
            places.append((self._before[index], stage))
        return not all(self._is_settled(*place) for place in places)

    def _commit(self, index: int, partition: PartitionPlan, stage: str) -> Commit:
        spec = self.pipeline[stage].spec
        stage_plan = partition.stages[stage]
        parts = self.parts[index, stage]
        manifest = Manifest(
            pipeline=self.pipeline.name,
            stage=stage,
            partition=partition.key,
            generation=stage_plan.generation,
            generations=stage_plan.generations,
            row_floor=self.row_floor(index, stage),
            plan=stage_plan.digest,
            definition=self.plan.definitions[stage],
            components=self.plan.components.get(stage, ()),
            schema=partition.schemas[stage],
            fragments=partition.fragments,
            parts=[parts[i].info for i in range(len(partition.fragments))],
            files=partition.files,
            upstream={},
            run_id=self.run_id,
            committed_at=0.0,
            info={"children": spec.makes_rows},
            kind=spec.kind,
            keys=self.pipeline._key_columns(stage),
            reads=spec.upstream,
            model=({"name": spec.udf.name, "pool": self.plan.pool(spec)} if spec.runs_udf else {}),
            lineage=spec.column_lineage(self.pipeline, partition.schemas),
            sample=tuple(self._samples.pop((index, stage), ())),
            source="" if self.plan.source.kind == PARQUET else self.plan.source.kind,
            id_rule=self._id_rule(partition),
            row_definition=stage_plan.row_definition,
            undone=self.plan.adoptions[stage].undone_names,
        )
        names = {**partition.input_names, **{s: p.done for s, p in partition.stages.items()}}
        folder = self.store.parts(self.pipeline.name, stage, partition.key)
        brings_ids = spec.makes_rows or spec.base_node(self.pipeline) == SOURCE
        return Commit(
            manifest=manifest,
            folder=folder,
            publish=spec.publisher(partition.key),
            # Ids that come from upstream were verified there.
            unique=self.pipeline[stage].id if brings_ids else None,
            upstream={u: names[u] for u in spec.upstream if u in names},
            opened=partition.inputs,
            figures=lambda made: self._figures(index, stage, made),
            done=lambda made, outcome: self._on_committed(index, stage, made, outcome),
            former=stage_plan.former,
            borrowed=[part for _, part in sorted(parts.items()) if part.folder.is_read_only],
        )

    def claim_name(self, index: int, stage: str) -> str:
        """Name the work on a stage of a partition, equal in runs that would write equal parts."""
        partition, definition = self.plan.partitions[index], self.plan.definitions[stage]
        generation = partition.stages[stage].generation
        return self._work_name(partition.key, stage, definition, generation)

    def _work_name(self, partition: str | None, stage: str, *work: str) -> str:
        """Name work for all drivers with the same path to the store."""
        root, folder = self.store.root, partition_folder(partition)
        return digest(protocol_of(root.url), root.path, self.pipeline.name, folder, stage, *work)

    @contextlib.contextmanager
    def _publishing(self, manifest: Manifest) -> Iterator[None]:
        """Wait until no other run publishes the partition, and keep others from doing so.

        Called on a thread of the committer.
        """
        names = [self._work_name(manifest.partition, manifest.stage, "publish")]
        while self.claims.ask([names])[0].held_by:
            time.sleep(_PUBLISH_POLL_SECONDS)
        try:
            yield
        finally:
            self.claims.ask((), names)

    def _id_rule(self, partition: PartitionPlan) -> str:
        if partition.inputs:
            return next(iter(partition.inputs.values())).id_rule
        rule = self.plan.id_rule(partition)
        return rule.record if rule else ""

    def _figures(self, index: int, stage: str, manifest: Manifest) -> dict[str, Any]:
        """Count what the partition took. Called on a thread of the committer."""
        stats = self.stats[index, stage]
        if stats.computed and manifest.model:
            stats.loads = self.usage.take_loads(manifest.model["pool"])
            if servers := self._servers.get(stage):
                stats.servers = self.usage.take_servers(servers)
        return computation_figures(self.pipeline[stage].spec, manifest, stats)

    def _on_committed(
        self, index: int, stage: str, manifest: Manifest, outcome: ManifestName | VaneError
    ) -> None:
        """Called on a thread of the committer."""
        if isinstance(outcome, VaneError):
            self._keep_failed_rows(index, stage, outcome)
            because = outcome.upstream if isinstance(outcome, WithheldError) else None
            self.emit(Failed(stage, manifest.partition, outcome, because))
        else:
            stats, spec = self.stats[index, stage], self.pipeline[stage].spec
            if manifest.run_id != self.run_id:  # another run committed the same at the same time
                manifest = replace(manifest, figures=computation_figures(spec, manifest, stats))
            self.emit(Committed(stage, manifest.partition, outcome, manifest, stats))
