"""Plans: the work of a run, as data."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from vane_dagster._texts import count
from vane_dagster.errors import VaneError
from vane_dagster.fingerprint.local_file import FileContent, LocalFile
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.causes import Causes, describe
from vane_dagster.planning.definition import definition_digest, pool_identity
from vane_dagster.planning.inputs import stages_read
from vane_dagster.sources import FragmentRule, Source
from vane_dagster.sources.row_ids import IdRule
from vane_dagster.storage.adoptions import Adoption, Adoptions, latest
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import (
    Component,
    FileRecord,
    FragmentRecord,
    Manifest,
    ManifestName,
    PartInfo,
)


@dataclass(frozen=True)
class Part:
    """A stored part, and its folder."""

    folder: StoragePath
    info: PartInfo


@dataclass(frozen=True)
class StagePlan:
    """The work of one stage in one partition.

    Attributes:
        digest: Digest of everything that the partition's rows are computed from.
        done: The manifest in force if it has this digest; nothing is computed then.
        keys: A fragment key for each fragment; empty if the whole partition is done.
        parts: Stored parts, by fragment index.
        generations: The generation of the keys of what the run computes, and earlier ones whose
            parts it uses; see `storage.manifest.raised`.
        given_up: How many runs gave the partition up since the manifest in force, because of the
            stage's failed rows, which are then computed again; and how often parts were lost.
        set_aside: Other parts with rows that may be copied: of runs that gave the partition up, and
            of former previews.
        former: The manifest that was in force when the plan was made.
        made_by: Its definition.
        row_definition: What determines the stage's output for a row; empty if rows have no keys.
        equal_rows: The row definitions that count as it, itself included.
        known_rows: Those of the manifests in which such rows may be.
        row_floor: That of the manifest in force; see `Manifest`.
        causes: Why the partition is not up to date.
    """

    digest: str
    generations: tuple[str, ...]
    done: ManifestName | None
    keys: tuple[str, ...] = ()
    parts: Mapping[int, Part] = field(default_factory=dict)
    given_up: int = 0
    set_aside: tuple[Part, ...] = ()
    former: ManifestName | None = None
    made_by: str = ""
    row_definition: str = ""
    equal_rows: frozenset[str] = frozenset()
    known_rows: frozenset[str] = frozenset()
    row_floor: int | None = 0
    causes: Causes = field(default_factory=Counter)

    @property
    def generation(self) -> str:
        """The generation of what the run computes."""
        return self.generations[0]

    @property
    def missing(self) -> tuple[int, ...]:
        """Indexes of the fragments to compute."""
        return tuple(i for i in range(len(self.keys)) if i not in self.parts)


@dataclass(frozen=True)
class PartitionPlan:
    """The work of a run in one partition.

    Attributes:
        key: The partition's key; None for an unpartitioned pipeline.
        files: The source files; those of the inputs if no selected stage reads the source.
        listed: The source files as they were listed, by URL, if a selected stage reads the source.
            A file with a new timestamp and unchanged content is in `files` under its former
            version.
        fragments: The fragments; empty if every selected stage is done.
        stages: A plan for each selected stage, upstream first.
        inputs: Manifests of stages that are read and not selected.
        input_names: The names of these manifests.
        schemas: Output schemas of the source, the inputs and the selected stages.
        sample: For a plan that computes only some rows, to compare and not to commit: their
            positions in each fragment of the stage's base node, by fragment index.
        preview: The number of first rows to compute of each fragment, of the source or of stored
            parts of upstream stages; empty for a plan that computes all. The counts of the
            fragments and of these parts are those of the first rows. Nothing is committed.
    """

    key: str | None
    stages: Mapping[str, StagePlan]
    files: tuple[FileRecord, ...] = ()
    listed: Mapping[str, FileRecord] = field(default_factory=dict)
    fragments: tuple[FragmentRecord, ...] = ()
    inputs: Mapping[str, Manifest] = field(default_factory=dict)
    input_names: Mapping[str, ManifestName] = field(default_factory=dict)
    schemas: Mapping[str, pa.Schema] = field(default_factory=dict)
    sample: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    preview: tuple[int, ...] = ()

    def files_of(self, fragment: FragmentRecord) -> tuple[FileRecord, ...]:
        """Return the files of a fragment, which must not have changed when they are read."""
        return tuple(self._by_url[span.url] for span in fragment.spans)

    @functools.cached_property
    def _by_url(self) -> Mapping[str, FileRecord]:
        return self.listed or {file.url: file for file in self.files}

    @functools.cached_property
    def touched(self) -> Mapping[str, FileRecord]:
        """The former records of files that were touched but not changed, by URL."""
        return {f.url: f for f in self.files if f != self.listed.get(f.url, f)}

    @property
    def is_sample(self) -> bool:
        """Whether only some rows are computed, and not committed."""
        return bool(self.preview or self.sample)

    @functools.cached_property
    def source_rows(self) -> int:
        """Rows of the fragments before any filter."""
        return sum(fragment.rows for fragment in self.fragments)


@dataclass(frozen=True)
class RunPlan:
    """The work of a run.

    Attributes:
        pipeline: The pipeline.
        selected: The selected stages, upstream first.
        partitions: The partitions that can be computed, in the requested order.
        failed: The partitions that cannot be planned, with the error.
        components: What the definition of each selected stage consists of.
        rule: How files are cut into fragments.
        source: The source, bound to the store.
        warnings: Problems in the store that were skipped, and what sources warn of.
        listed_at: Time on the monotonic clock, in seconds, just before the store was listed.
        forced: Whether everything selected is recomputed.
        retried: Whether quarantined rows are computed again.
        adoptions: The adoptions of the pipeline's stages.
        files: The local files among each selected stage's arguments, with the contents that its
            keys were computed from.
        origin: Id of the run that what is computed again is named after: the run itself, or the one
            that submitted its batches.
        kept: The pickled classes of stages that use instances of former code; see
            `engine.kept_instances`.
        new_source: The description of the source, unless the store has it from the last run.
    """

    pipeline: Pipeline
    selected: tuple[str, ...]
    partitions: Sequence[PartitionPlan]
    failed: Mapping[str | None, VaneError]
    components: Mapping[str, Sequence[Component]]
    rule: FragmentRule
    source: Source
    warnings: Sequence[str] = ()
    listed_at: float = 0.0
    forced: bool = False
    retried: bool = False
    files: Mapping[str, Mapping[LocalFile, FileContent]] = field(default_factory=dict)
    adoptions: Mapping[str, Adoptions] = field(default_factory=lambda: defaultdict(Adoptions))
    origin: str | None = None
    kept: Mapping[str, bytes] = field(default_factory=dict)
    new_source: str | None = None
    _pools: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def definitions(self) -> Mapping[str, str]:
        """Code version of each selected stage."""
        return {stage: definition_digest(each) for stage, each in self.components.items()}

    @functools.cached_property
    def adopted(self) -> Mapping[str, Sequence[Adoption]]:
        """The adoptions of each selected stage whose definition counts as one with others."""
        every = {s: self.adoptions[s].of(each) for s, each in self.definitions.items()}
        return {stage: adopted for stage, adopted in every.items() if adopted}

    def pool(self, spec: MapBatchesSpec) -> str:
        """Return the identity of a stage's workers, which no edit during the run changes."""
        if spec.name not in self._pools:
            self._pools[spec.name] = pool_identity(self.pipeline, spec)
        return self._pools[spec.name]

    def id_rule(self, partition: PartitionPlan) -> IdRule | None:
        """Return how ids of the source's rows are computed; None if a column has them."""
        rule = self.pipeline.id_rule
        return None if rule is None else rule.of(partition.schemas[SOURCE])

    @functools.cached_property
    def is_sample(self) -> bool:
        """Whether only some rows are computed, of stages that are not committed."""
        return any(partition.is_sample for partition in self.partitions)

    def with_downstream(self, stage: str) -> set[str]:
        """Return a stage and the selected stages that read of it, directly or not."""
        downstream = {stage}
        for name in self.selected:
            if not downstream.isdisjoint(stages_read(self.pipeline, self.pipeline[name].spec)):
                downstream.add(name)
        return downstream

    def due(self, stage: str) -> dict[str | None, Causes]:
        """Return the partitions in which a stage is not up to date, each with the causes."""
        plans = {partition.key: partition.stages[stage] for partition in self.partitions}
        return {key: plan.causes for key, plan in plans.items() if plan.done is None}

    def missing(self, stage: str) -> int:
        """Return the number of fragments of a stage to compute, over all partitions."""
        return sum(len(partition.stages[stage].missing) for partition in self.partitions)

    def missing_batches(self, stage: str, size: int) -> int:
        """Return the maximum number of batches in the fragments to compute."""
        return sum(
            -(-partition.fragments[i].rows // size)
            for partition in self.partitions
            for i in partition.stages[stage].missing
        )

    def needed(self) -> tuple[str, ...]:
        """Return the selected stages that have something to compute, upstream first."""
        return tuple(stage for stage in self.selected if self.missing(stage))

    def __str__(self) -> str:
        text = count(len(self.partitions) + len(self.failed), "partition")
        if self.failed:
            text += f" ({len(self.failed):,} cannot be planned)"
        lines = [f"pipeline {self.pipeline.name}: {text}; fragments of {self.rule}"]
        for adopted in self.adopted.values():
            lines += [f"  {line}" for line in latest([each.since for each in adopted])]
        for stage in self.selected if self.partitions else ():
            due, total = self.due(stage), len(self.partitions)
            line = f"  {stage}: {total - len(due):,} of {count(total, 'partition')} up to date"
            if due:
                stored = sum(len(p.stages[stage].parts) for p in self.partitions if p.key in due)
                line += (
                    f", {len(due):,} out of date ({describe(due, total)}); fragments: "
                    f"{self.missing(stage):,} to compute, {stored:,} in the store"
                )
            lines.append(line)
        return "\n".join(lines)
