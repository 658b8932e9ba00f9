"""Where the rows of a run's keyed stages are looked up, and which partitions wait for others.

A fragment's rows are looked up in the parts of its partition that the run has found or written, and
in the manifests in force of its partition and of the preceding ones. If a partition has no manifest
of the stage, which may have been renamed, stages that the pipeline no longer has are searched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

from vane_dagster.engine.fragment_state import FragmentState, input_id
from vane_dagster.engine.renamed_stages import opened
from vane_dagster.engine.run_state import RunState
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.planning.plan import Part, StagePlan
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.row_records import RecordedPart
from vane_dagster.worker.protocol import RecordGroup, RowLookup
from vane_dagster.worker.reports import WorkReport

_MIN_FOUND = 0.05
"""Share of rows found in other partitions below which partitions no longer wait for each other."""
_BLOCK = 8
"""Groups of a run's parts that are replaced by one; see `written_groups`."""
_GROUP_ROWS = 4_000_000
"""Rows of an index at most, unless one part has more: about 300 MB while it is built."""


class RowLookups:
    """Finds the parts with the rows that a stage may copy, when a fragment is about to begin.

    These are the parts in force of the same partition and of the preceding ones, as many as the
    stage says. The parts of the same partition that this run has written come first; see
    `written_groups`.

    A partition of this run waits until those before it are computed. If these waits turn out to be
    in vain, because hardly any row was found in another partition, they end.
    """

    def __init__(self, state: RunState) -> None:
        self._state, self._plan = state, state.plan
        self._indexes = {p.key: index for index, p in enumerate(state.plan.partitions)}
        self.resolve = cache(self._resolve)
        # Rows that were looked up, and those found in other partitions; by stage.
        self._counted = defaultdict[str, dict[int, Counter[str]]](lambda: defaultdict(Counter))
        self._completed: dict[str, Counter[str]] = defaultdict(Counter)

    def _resolve(self, partition: int, stage: str) -> RowLookup | None:
        """Return where the rows of a stage are looked up besides the parts of this run.

        None if they have no keys. Reads manifests. Called on the fragment queue's thread.
        """
        spec, plan = self._state.pipeline[stage].spec, self._stage_plan(partition, stage)
        if not plan.row_definition or not spec.runs_udf:
            return None
        return RowLookup(
            () if self._plan.forced else tuple(self._groups(partition, spec)),
            self._state.row_floor(partition, stage) or 0,
            inherits_failures=spec.isolates_rows and not (self._plan.retried or plan.given_up),
            equal_rows=tuple(sorted(plan.equal_rows)),
        )

    def finds(self, stage: str) -> bool:
        """Whether the first partition to compute has rows to look up, so that all may be copies."""
        left = self._state.fragments_left([stage])
        ready = (i for i in left if not self.must_wait(i, [stage]))  # else it lacks what they find
        known = next((self.resolve(partition, stage) for partition in ready), None)
        return known is not None and bool(known.groups)

    def must_wait(self, partition: int, stages: Sequence[str]) -> bool:
        """Whether a partition waits for the rows of another one of this run."""
        return any(
            key in self._indexes and self._is_pending(self._indexes[key], stage)
            for stage in stages
            if self._definition(partition, stage) and self._is_worthwhile(stage)
            for key in self._state.searched(partition, stage)
        )

    def record(self, fragment: FragmentState, stage: str, report: WorkReport) -> None:
        """Count a fragment's rows, and how many of them were found in other partitions."""
        known = fragment.known.get(stage)
        if known is not None and any(not group.is_own for group in known.groups):
            counts = self._counted[stage][fragment.partition]
            counts.update(rows=report.rows_out, found=report.found_elsewhere)

    def _stage_plan(self, partition: int, stage: str) -> StagePlan:
        return self._plan.partitions[partition].stages[stage]

    def _definition(self, partition: int, stage: str) -> str:
        return self._stage_plan(partition, stage).row_definition

    def _is_worthwhile(self, stage: str) -> bool:
        """Whether enough rows were found elsewhere, in the partitions that are computed."""
        counted, completed = self._counted[stage], self._completed[stage]
        for index in [index for index in counted if not self._is_pending(index, stage)]:
            completed.update(counted.pop(index))
        return completed["found"] >= _MIN_FOUND * completed["rows"]

    def _is_pending(self, index: int, stage: str) -> bool:
        """Whether a partition of this run will have parts that it does not have yet."""
        state = self._state
        if (index, stage) in state.pending or any(place[0] == index for place in state.damaged):
            return False
        return bool(state.due(index, [stage]))

    def _groups(self, partition: int, spec: MapBatchesSpec) -> Iterator[RecordGroup]:
        planned, stage = self._plan.partitions[partition], spec.name
        plan, store, pipeline = planned.stages[stage], self._state.store, self._state.pipeline.name
        add = partial(self._stored, partition, stage)
        id = input_id(self._state.pipeline, stage)
        if plan.former is not None:  # those of its parts that stay in force are the run's own
            names = {part.info.name for part in plan.parts.values()}
            yield from add(partial(store.read, pipeline, stage, planned.key, plan.former), names)
        else:
            renamed = self._state.renamed.in_force
            yield from add(partial(renamed, stage, planned.key, plan.known_rows))
        alike = [part for part in plan.set_aside if part.info.input_id == id]
        yield from _recorded_groups(alike, id, True)
        for key in self._state.searched(partition, stage):
            index = self._indexes.get(key)
            computed = None if index is None else self._computed(index, stage, plan.row_definition)
            if index is None or computed is None:
                yield from add(partial(self._in_force, stage, key, plan.known_rows))
                continue
            yield from _recorded_groups(computed, id, False)
            former = self._plan.partitions[index].stages[stage].former
            if former is not None:  # it has the rows that have moved from there to this partition
                names = {part.info.name for part in computed}
                yield from add(partial(store.read, pipeline, stage, key, former), names)

    def _in_force(self, stage: str, key: str | None, known: frozenset[str]) -> Manifest | None:
        """Open the manifest in force of a partition; without one, see `RenamedStages`."""
        own = self._state.store.in_force(self._state.pipeline.name, stage, key)
        return own or self._state.renamed.in_force(stage, key, known)

    def _computed(self, index: int, stage: str, definition: str) -> list[Part] | None:
        """The parts of another partition; None if this run has not completed them."""
        planned, parts = self._plan.partitions[index], self._state.parts[index, stage]
        plan = planned.stages[stage]
        if plan.done or plan.row_definition != definition or len(parts) < len(planned.fragments):
            return None
        return [part for _, part in sorted(parts.items())]

    def _stored(
        self,
        partition: int,
        stage: str,
        read: Callable[[], Manifest | None],
        without: Collection[str] = (),
    ) -> Iterator[RecordGroup]:
        """Yield the parts of a manifest, if it can be read and has the stage's row definition."""
        manifest = opened(read, self._state.emit)
        known = self._stage_plan(partition, stage).known_rows
        if manifest is None or manifest.row_definition not in known:
            return
        folder = self._state.store.parts_of(manifest)
        parts = [Part(folder, part) for part in manifest.parts if part.name not in without]
        id = manifest.keys[manifest.input_key]
        is_own = manifest.partition == self._plan.partitions[partition].key
        yield from _recorded_groups(parts, id, is_own)


def written_groups(
    parts: Sequence[Part], stored: int, id: str, made: dict[Any, list[RecordGroup]]
) -> Iterator[RecordGroup]:
    """Divide the parts of a partition into groups, each with an index on each node.

    Parts that this run has written are grouped in the order in which they were written: each group
    has 1, 8, 64 or another power of 8 parts, and starts at a multiple of its size. Thus a fragment
    searches few indexes, and each part is indexed few times. Groups are kept in `made`.
    """
    stored = min(stored, len(parts))
    bounds = [0, stored] if stored else [0]
    while (start := bounds[-1]) < len(parts):
        size = 1
        while (start - stored) % (_BLOCK * size) == 0 and start + _BLOCK * size <= len(parts):
            size *= _BLOCK
        bounds.append(start + size)
    for start, stop in pairwise(bounds):
        place = parts[start].info.name, parts[stop - 1].info.name, stop - start
        if place not in made:
            made[place] = [*_recorded_groups(parts[start:stop], id, True)]
        yield from made[place]


def _recorded_groups(parts: Sequence[Part], id: str, is_own: bool) -> Iterator[RecordGroup]:
    """Divide parts into groups of so many rows that an index is built in little memory."""
    group: list[RecordedPart] = []
    rows = 0
    for part in parts:
        if not part.info.row_records:
            continue
        if group and rows + part.info.rows_in > _GROUP_ROWS:
            yield RecordGroup(tuple(group), id, is_own)
            group, rows = [], 0
        group.append(RecordedPart.of(part.folder, part.info))
        rows += part.info.rows_in
    if group:
        yield RecordGroup(tuple(group), id, is_own)
