"""Plans: what a run has to compute, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from vane_dagster.errors import VaneError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.sources import FragmentRule, Source
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import (
    FileRecord,
    FragmentRecord,
    Manifest,
    ManifestName,
    PartInfo,
)


@dataclass(frozen=True)
class Part:
    """A part that is in the store, and the folder that it is in."""

    folder: Location
    info: PartInfo


@dataclass(frozen=True)
class StagePlan:
    """What one stage of one partition needs.

    Attributes:
        digest: Digest of everything that the partition's rows are computed from.
        generation: Raised by a forced run.
        done: The manifest in force, where it has this digest: nothing is to be done.
        keys: A fragment key for each fragment; empty where the whole partition is done.
        parts: Parts that the store holds, by index of fragment.
        leaving: Indexes of fragments whose part the store is about to delete.
        mends: Former parts of fragments whose failed rows alone are computed, by index.
        former: The manifest that was in force when the plan was made.
        renamed: The stage's former name, and the manifest of it whose parts are taken over.
    """

    digest: str
    generation: int
    done: ManifestName | None
    keys: tuple[str, ...] = ()
    parts: Mapping[int, Part] = field(default_factory=dict)
    leaving: frozenset[int] = frozenset()
    mends: Mapping[int, Part] = field(default_factory=dict)
    former: ManifestName | None = None
    renamed: tuple[str, ManifestName] | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """Indexes of the fragments that have to be computed."""
        return tuple(i for i in range(len(self.keys)) if i not in self.parts)


@dataclass(frozen=True)
class PartitionPlan:
    """What one partition of a run needs.

    Attributes:
        key: The partition's key, None for an unpartitioned pipeline.
        files: The source files, where a selected stage reads the source.
        listed: The source files as they were listed, by URL; a file that was touched and not
            changed stands in `files` under its former version.
        fragments: The fragments; empty where every selected stage is done.
        stages: A plan for each selected stage, upstream first.
        inputs: Manifests of stages that are read and not selected.
        input_names: Their names.
        schemas: Output schemas of the source, the inputs and the selected stages.
        sample: Where some rows alone are computed, to be compared and not committed: their places
            in each fragment of what the stage is based on, by index of fragment.
    """

    key: str | None
    files: tuple[FileRecord, ...]
    listed: Mapping[str, FileRecord]
    fragments: tuple[FragmentRecord, ...]
    stages: Mapping[str, StagePlan]
    inputs: Mapping[str, Manifest]
    input_names: Mapping[str, ManifestName]
    schemas: Mapping[str, pa.Schema]
    sample: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The partition's name in messages."""
        return "the unpartitioned data" if self.key is None else f"partition {self.key!r}"

    @property
    def found(self) -> tuple[FileRecord, ...]:
        """The source files as they were listed, sorted by URL."""
        return tuple(self.listed.values())

    @property
    def source_rows(self) -> int:
        """Rows of the fragments before any filter."""
        return sum(fragment.stop - fragment.start for fragment in self.fragments)


@dataclass(frozen=True)
class RunPlan:
    """What a run has to compute.

    Attributes:
        pipeline: The pipeline.
        selected: The selected stages, upstream first.
        partitions: The partitions that can be computed, in the order asked for.
        failed: Partitions that cannot, and why.
        definitions: Code version of each selected stage.
        rule: How files are cut into fragments.
        source: The source, bound to the store.
        warnings: What is wrong in the store and was passed over.
        listed_at: By the monotonic clock, when the store was not listed yet.
        forced: Whether everything selected is computed again.
        code: Digest of the user's code of each selected stage, as its keys were made from it.
    """

    pipeline: Pipeline
    selected: tuple[str, ...]
    partitions: Sequence[PartitionPlan]
    failed: Mapping[str | None, VaneError]
    definitions: Mapping[str, str]
    rule: FragmentRule
    source: Source
    warnings: Sequence[str] = ()
    listed_at: float = 0.0
    forced: bool = False
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_sample(self) -> bool:
        """Whether some rows alone are computed, of stages that are not committed."""
        return any(partition.sample for partition in self.partitions)

    def missing(self, stage: str) -> int:
        """Fragments of a stage that have to be computed, over all partitions."""
        return sum(len(partition.stages[stage].missing) for partition in self.partitions)

    def missing_batches(self, stage: str, size: int) -> int:
        """Batches of `size` rows that those fragments hold, at most."""
        return sum(
            -(-(partition.fragments[i].stop - partition.fragments[i].start) // size)
            for partition in self.partitions
            for i in partition.stages[stage].missing
        )

    def needed(self) -> tuple[str, ...]:
        """The selected stages that have something to compute, upstream first."""
        return tuple(stage for stage in self.selected if self.missing(stage))

    def __str__(self) -> str:
        asked = len(self.partitions) + len(self.failed)
        told = f"{asked:,} partition{'s' * (asked != 1)}"
        if self.failed:
            told += f" ({len(self.failed):,} cannot be planned)"
        lines = [f"pipeline {self.pipeline.name}: {told}; fragments of {self.rule}"]
        for stage in self.selected:
            plans = [partition.stages[stage] for partition in self.partitions]
            done = sum(plan.done is not None for plan in plans)
            state = f"{done:,} of {len(plans):,} partitions up to date"
            if len(plans) == 1:
                state = "up to date" if done else "not up to date"
            stored = sum(len(plan.parts) for plan in plans)
            lines.append(
                f"  {stage}: {state}; fragments: {self.missing(stage):,} to compute, "
                f"{stored:,} in the store"
            )
        return "\n".join(lines)
