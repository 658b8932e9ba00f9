"""Plans that compute a stage for the first rows of its input, without committing anything.

A preview is part of the plan of a run: the first fragments of one partition. Each stage computes
their first rows. Stored parts of upstream stages are read, missing ones are computed. It is
executed like any other plan; see `PartitionPlan.preview`.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.inputs import stages_read
from vane_dagster.planning.plan import Part, PartitionPlan, RunPlan, StagePlan
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, PartInfo

_GROWTH, MOST = 4, 4096
EVERY = sys.maxsize
"""As many times as many rows as there are."""


def previews(
    planned: RunPlan, stage: str, rows: int, most: int = MOST, files: Collection[str] = ()
) -> Iterator[RunPlan]:
    """Yield plans of a stage's first rows, for as long as too few of them reach the stage.

    The plans are of the first partition that may have rows for the stage. A plan reads the first
    rows of as many fragments as have so many, and the next one four times as many, from the first
    row again, up to `most` times as many as wanted. `SchemaInference` sees to it that rows with
    keys are computed only once.

    If URLs of files are given, only their rows of the source are read, and only parts with them.
    """
    for partition in with_rows(planned, stage)[:1]:
        if files:
            fragments = tuple(rows_of_files(each, files) for each in partition.fragments)
            partition = replace(partition, fragments=fragments)
        preview = _Preview(planned, partition, stage)
        cuts, size = dict[int, int](), rows
        while cuts != preview.fragments and size <= most * rows:
            cuts = preview.first(size)
            yield preview.plan(cuts)
            size *= _GROWTH


def with_rows(planned: RunPlan, stage: str) -> list[PartitionPlan]:
    """Return the partitions that may have rows for a stage."""
    return [each for each in planned.partitions if _Preview(planned, each, stage).fragments]


@dataclass(frozen=True)
class _Preview:
    """The first rows of a stage in one partition."""

    planned: RunPlan
    partition: PartitionPlan
    stage: str

    @functools.cached_property
    def fragments(self) -> dict[int, int]:
        """The fragments that may have rows for the stage, and the number of rows to read of each.

        Those with an empty stored part have none. All are counted in rows of one node.
        """
        given = enumerate(self.partition.fragments)
        indexes = [i for i, fragment in given if fragment.rows and sum(self._rows([i]))]
        return dict(zip(indexes, self._rows(indexes)))

    def first(self, rows: int) -> dict[int, int]:
        """Return how many rows of each fragment are the first ones."""
        cuts, left = dict[int, int](), rows
        for index, count in self.fragments.items():
            if left:
                cuts[index] = min(count, left)
                left -= cuts[index]
        return cuts

    def _rows(self, indexes: Sequence[int]) -> list[int]:
        """Return the rows of fragments in the nearest node that is stored for all of them."""
        pipeline, node = self.planned.pipeline, self.stage
        while (node := pipeline[node].spec.base_node(pipeline)) != SOURCE:
            parts = [part for index in indexes if (part := self._stored(node, index))]
            if len(parts) == len(indexes):
                return [part.rows for part in parts]
        return [self.partition.fragments[index].rows for index in indexes]

    def _stored(self, stage: str, index: int) -> PartInfo | None:
        if stage in self.partition.inputs:
            return self.partition.inputs[stage].parts[index]
        part = self.partition.stages[stage].parts.get(index)
        return None if part is None else part.info

    def plan(self, cuts: Mapping[int, int]) -> RunPlan:
        """Return the plan of the first rows of some fragments, so many of each."""
        planned, partition = self.planned, self.partition
        computed, read = self._needed(cuts)
        whole = _matched(planned, computed)

        def first(name: str, info: PartInfo, index: int) -> PartInfo:
            if name in whole or cuts[index] == self.fragments[index]:
                return info
            return replace(info, rows=min(cuts[index], info.rows))

        stages: dict[str, StagePlan] = {}
        for name in planned.selected:
            plan = partition.stages[name]
            stored = [(index, plan.parts[index]) for index in cuts if name in read]
            parts = [Part(part.folder, first(name, part.info, index)) for index, part in stored]
            keys = tuple(part.info.key for part in parts)
            if name in computed:  # no other plan finds these parts
                keys = tuple(secrets.token_hex(20) for _ in cuts)
            if keys:
                made = replace(plan, done=None, former=None, keys=keys)
                stages[name] = replace(made, parts=dict(enumerate(parts)))
        cut = PartitionPlan(
            key=partition.key,
            files=partition.files,
            listed=partition.listed,
            fragments=tuple(
                partition.fragments[index]
                if SOURCE in whole
                else first_rows(partition.fragments[index], rows)
                for index, rows in cuts.items()
            ),
            stages=stages,
            inputs={
                name: replace(
                    manifest,
                    parts=[first(name, manifest.parts[index], index) for index in cuts],
                )
                for name, manifest in partition.inputs.items()
                if name in read
            },
            schemas=partition.schemas,
            preview=tuple(cuts.values()),
        )
        return replace(planned, selected=tuple(stages), partitions=[cut], failed={}, warnings=())

    def _needed(self, indexes: Collection[int]) -> tuple[set[str], set[str]]:
        """Return the stages to compute, and those that have the parts of all fragments."""
        pipeline = self.planned.pipeline
        computed, read, wanted = {self.stage}, set[str](), [self.stage]
        while wanted:
            for name in stages_read(pipeline, pipeline[wanted.pop()].spec):
                if all(self._stored(name, index) is not None for index in indexes):
                    read.add(name)
                elif name not in computed:
                    computed.add(name)
                    wanted.append(name)
        return computed, read


def _matched(planned: RunPlan, computed: Collection[str]) -> set[str]:
    """Return the nodes that joins match by id, so that only some of their rows are needed.

    Those rows may be anywhere in a fragment, so it is read as a whole.
    """
    specs = [planned.pipeline[name].spec for name in computed]
    bases = {spec.base_node(planned.pipeline) for spec in specs}
    return {name for spec in specs for name in spec.upstream} - bases


def first_rows(fragment: FragmentRecord, rows: int) -> FragmentRecord:
    """Return a fragment of the first rows of a fragment."""
    if rows >= fragment.rows:
        return fragment
    left, spans = rows, list[FileSpan]()
    for span in fragment.spans:
        if left > 0:
            spans.append(replace(span, stop=min(span.stop, span.start + left)))
            left -= span.stop - span.start
    return _of_spans(fragment, spans)


def rows_of_files(fragment: FragmentRecord, files: Collection[str]) -> FragmentRecord:
    """Return a fragment of the rows of some files, by their URLs."""
    return _of_spans(fragment, [span for span in fragment.spans if span.url in files])


def _of_spans(fragment: FragmentRecord, spans: Sequence[FileSpan]) -> FragmentRecord:
    rows = sum(span.stop - span.start for span in spans)
    return replace(
        fragment,
        stop=fragment.start + rows,
        bytes=fragment.bytes * rows // max(1, fragment.rows),
        files=spans if fragment.files else (),
    )
