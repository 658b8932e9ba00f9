"""Plans that compute a stage for the first rows of its input, without committing anything.

A preview is part of the plan of a run: one fragment of one partition. Each stage computes
the first rows. Stored parts of upstream stages are read, missing ones are computed. It is executed
like any other plan; see `PartitionPlan.preview`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.planning.inputs import stages_read
from vane_dagster.planning.plan import Part, PartitionPlan, RunPlan, StagePlan
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, PartInfo

MAX_FRAGMENTS = 4
"""Fragments of a partition that previews read, at most, until one has rows for the stage."""
MAX_PARTITIONS = 4
"""Partitions that previews read, at most, until one has rows for the stage."""
_GROWTH = 32


@dataclass(frozen=True)
class PreviewKey:
    """Identifies what a preview computed of a stage.

    Attributes:
        stage: The stage.
        partition: The partition.
        fragment: The identity of the fragment.
        rows: The rows of the fragment that were read.
    """

    stage: str
    partition: str | None
    fragment: str
    rows: int


def previews(
    planned: RunPlan, stage: str, rows: int, kept: Mapping[PreviewKey, Part]
) -> Iterator[RunPlan]:
    """Yield plans of a stage's first rows, each of more rows or of other fragments.

    A filter upstream may drop the first rows, so the caller executes one after the other until the
    stage has rows.

    Args:
        planned: The plan of a run of the stage, and of the upstream stages that may be computed.
        stage: The stage.
        rows: Rows of the source, or of a stored part, that the first plan reads.
        kept: Parts of upstream stages that earlier previews have computed. It may grow.
    """
    for partition in with_rows(planned, stage)[:MAX_PARTITIONS]:
        for index in _fragments(planned, partition, stage)[:MAX_FRAGMENTS]:
            available = _rows(planned, partition, stage, index)
            size = rows
            while True:
                fragment = partition.fragments[index].identity
                keys = {n: PreviewKey(n, partition.key, fragment, size) for n in planned.selected}
                former = {name: kept[key] for name, key in keys.items() if key in kept}
                yield _cut(planned, partition, stage, index, size, former)
                if size >= available:
                    break
                size *= _GROWTH


def with_rows(planned: RunPlan, stage: str) -> list[PartitionPlan]:
    """Return the partitions that may have rows for a stage.

    Args:
        planned: The plan of a run of the stage.
        stage: The stage.
    """
    return [each for each in planned.partitions if _fragments(planned, each, stage)]


def _fragments(planned: RunPlan, partition: PartitionPlan, stage: str) -> list[int]:
    """Return the fragments that may have rows for a stage: those without an empty stored part."""
    return [
        index
        for index in range(len(partition.fragments))
        if _rows(planned, partition, stage, index)
    ]


def _rows(planned: RunPlan, partition: PartitionPlan, stage: str, index: int) -> int:
    """Return the rows of a fragment from which a stage would be computed."""
    base = planned.pipeline[stage].spec.base_node(planned.pipeline)
    if base == SOURCE:
        fragment = partition.fragments[index]
        return fragment.stop - fragment.start
    if (info := _stored(partition, base, index)) is not None:
        return info.rows
    return _rows(planned, partition, base, index)


def _stored(partition: PartitionPlan, stage: str, index: int) -> PartInfo | None:
    if stage in partition.inputs:
        return partition.inputs[stage].parts[index]
    part = partition.stages[stage].parts.get(index)
    return None if part is None else part.info


def _cut(
    planned: RunPlan,
    partition: PartitionPlan,
    stage: str,
    index: int,
    rows: int,
    former: Mapping[str, Part],
) -> RunPlan:
    """Return the plan of the first rows of a fragment."""
    computed, read = _needed(planned, partition, stage, index, former)
    whole = _matched(planned, computed)
    stages: dict[str, StagePlan] = {}
    for name in planned.selected:
        plan = partition.stages[name]
        if name in computed:  # no other plan finds these parts
            stages[name] = StagePlan(plan.digest, plan.generation, None, (secrets.token_hex(20),))
        elif name in read:
            part = former.get(name)
            if part is None:
                stored = plan.parts[index]
                info = stored.info if name in whole else _first_rows(stored.info, rows)
                part = Part(stored.folder, info)
            keys = (part.info.key,)
            stages[name] = StagePlan(plan.digest, plan.generation, None, keys, {0: part})
    inputs = {name: manifest.parts[index] for name, manifest in partition.inputs.items()}
    fragment = partition.fragments[index]
    cut = PartitionPlan(
        key=partition.key,
        files=(),
        listed=partition.listed,
        fragments=(fragment if SOURCE in whole else first_rows(fragment, rows),),
        stages=stages,
        inputs={
            name: replace(
                partition.inputs[name],
                parts=[part if name in whole else _first_rows(part, rows)],
            )
            for name, part in inputs.items()
            if name in read
        },
        input_names={},
        schemas=partition.schemas,
        preview=rows,
    )
    return replace(planned, selected=tuple(stages), partitions=[cut], failed={}, warnings=())


def _needed(
    planned: RunPlan,
    partition: PartitionPlan,
    stage: str,
    index: int,
    former: Mapping[str, Part],
) -> tuple[set[str], set[str]]:
    """Return the stages to compute for a stage, and those whose parts are read."""
    computed, read, wanted = {stage}, set[str](), [stage]
    while wanted:
        for name in stages_read(planned.pipeline, planned.pipeline[wanted.pop()].spec):
            if name in former or _stored(partition, name, index) is not None:
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


def _first_rows(part: PartInfo, rows: int) -> PartInfo:
    return replace(part, rows=min(rows, part.rows))


def first_rows(fragment: FragmentRecord, rows: int) -> FragmentRecord:
    """Return a fragment of the first rows of a fragment.

    Args:
        fragment: The fragment.
        rows: The number of rows.
    """
    total = fragment.stop - fragment.start
    if rows >= total:
        return fragment
    left, spans = rows, list[FileSpan]()
    for span in fragment.spans:
        if left > 0:
            spans.append(replace(span, stop=min(span.stop, span.start + left)))
            left -= span.stop - span.start
    return replace(
        fragment,
        stop=fragment.start + rows,
        bytes=fragment.bytes * rows // total,
        files=spans if fragment.files else (),
    )
