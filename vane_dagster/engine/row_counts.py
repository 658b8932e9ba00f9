"""The rows that a run would compute, counted by their keys, without the user's code.

A plan builds the work that the run would send to its workers, and does what needs no code of the
user: it reads stored rows, evaluates projections and joins over them, looks up row keys, and copies
known rows for the stages downstream.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.compute.in_process import compute_here
from vane_dagster.engine.check_runner import Before, CheckRunner
from vane_dagster.engine.fragment_state import FragmentState, Held, make_task_states
from vane_dagster.engine.row_lookups import RowLookups
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.engine.tasks import Task, WorkBuilder
from vane_dagster.errors import VaneError, described
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.forecast import CountedRows, Place
from vane_dagster.planning.inputs import stages_read
from vane_dagster.planning.plan import RunPlan
from vane_dagster.planning.source_code import source_definition
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.storage.row_floor import read_epoch
from vane_dagster.storage.row_records import KEY_HIGH, KEY_LOW
from vane_dagster.storage.store import Store

_Keys = npt.NDArray[Any]
_KEY = np.dtype([(KEY_HIGH, np.uint64), (KEY_LOW, np.uint64)])


def count_rows(plan: RunPlan, store: Store, run_id: str, before: Before) -> CountedRows:
    """Count the rows that a run by a plan would compute, as far as its inputs are stored."""
    checks = CheckRunner(plan.pipeline, store, before)
    state = RunState(plan, store, run_id, lambda event: None, checks)
    try:
        needed = plan.needed() if not plan.forced else ()
        state.epochs = {s: read_epoch(store, plan.pipeline.name, s) for s in needed}
        return _RowCounter(state).count()
    finally:
        state.close()


class _RowCounter:
    """Counts the rows of a plan, one fragment after another."""

    def __init__(self, state: RunState) -> None:
        self._state, self._plan, self._pipeline = state, state.plan, state.pipeline
        self._lookups = RowLookups(state)
        self._builder = WorkBuilder(state, "", SliceSizer({}))
        self._reads_source = not source_definition(state.plan.source)
        self._rows: dict[Place, tuple[int, int]] = {}
        self._computed: dict[Place, tuple[int, int, int]] = {}
        self._keys: dict[tuple[str, str | None], list[_Keys]] = defaultdict(list)
        self._known: dict[tuple[str, str | None], list[_Keys]] = defaultdict(list)
        self._problems: dict[str, None] = {}

    def count(self) -> CountedRows:
        """Count the rows of all fragments to compute."""
        for index, fragments in self._state.fragments_left(self._plan.selected).items():
            for fragment in fragments:
                self._count(index, fragment)
        repeated: Counter[str] = Counter()
        for place, keys in self._keys.items():
            known, every = np.unique(np.concatenate(self._known[place])), np.concatenate(keys)
            distinct = len(np.unique(np.concatenate([known, every]))) - len(known)
            repeated[place[0]] += len(every) - distinct  # the run may copy one that it has found
        return CountedRows(self._rows, self._computed, repeated, tuple(self._problems))

    def _count(self, partition: int, index: int) -> None:
        planned = self._plan.partitions[partition]
        specs = [
            self._pipeline[stage].spec
            for stage in self._plan.selected
            if index in planned.stages[stage].missing
        ]
        states = make_task_states(self._pipeline, specs)
        fragment = FragmentState(partition, index, planned.fragments[index], states)
        for place, spec in enumerate(specs):
            task = Task(fragment, 0, spec.name, "whole")
            unknown = self._unknown(fragment, spec)
            try:
                if unknown is None:
                    continue
                if spec.runs_udf:
                    unknown += self._look_up(task, spec, unknown)
                    if not any(below.runs_udf for below in specs[place + 1 :]):
                        continue
                    if not task.state.given or (unknown and spec.makes_rows):
                        continue
                    work, tables = self._builder.gather(task)
                elif fragment.is_read(spec.name):
                    work, tables = self._builder.whole(task)
                else:
                    continue
                table = compute_here(work, tables).rows
                states[spec.name].table = Held(table, table.num_rows)
                self._rows[planned.key, spec.name, index] = table.num_rows, unknown
            except Exception as error:  # the run will meet it too
                text = str(error) if isinstance(error, VaneError) else described(error)
                self._problems[f"rows of {spec.name!r} were not counted: {text}"] = None

    def _unknown(self, fragment: FragmentState, spec: StageSpec) -> int | None:
        """Return how many rows a stage may read that only a run can compute.

        None if no others are known: those that are stored, or follow from stored rows without code.
        """
        key, unknown = self._plan.partitions[fragment.partition].key, 0
        for node in {*spec.upstream, *stages_read(self._pipeline, spec)}:
            if node == SOURCE:
                is_known = self._reads_source
            elif node in spec.upstream and node in fragment.task_states:
                is_known = fragment.task_states[node].table is not None
                unknown += self._rows.get((key, node, fragment.index), (0, 0))[1]
            else:
                is_known = fragment.index in self._state.parts[fragment.partition, node]
            if not is_known or (unknown and len(spec.upstream) > 1):
                return None
        return unknown

    def _look_up(self, task: Task, spec: MapBatchesSpec, unknown: int) -> int:
        """Count the rows of a keyed stage that have no stored outcome; return at most how many.

        There are at most so many rows besides those in memory that are unknown.
        """
        fragment, stage = task.fragment, spec.name
        known = self._lookups.resolve(fragment.partition, stage)
        if known is None:
            return 0
        fragment.known[stage] = known
        work, tables = self._builder.load(task, None)
        outcome = compute_here(work, tables)
        rows, new = outcome.rows, outcome.report.tally.rows_in
        marks = rows.column(rows.num_columns - 1).combine_chunks()
        computed = rows.slice(0, new)
        has_errors = ROW_ERROR in computed.column_names  # of rows that the source could not read
        errors = computed.column(ROW_ERROR) if has_errors else pa.nulls(new)
        is_read = np.asarray(pc.is_null(errors), bool)
        keys = np.empty(rows.num_rows, _KEY)
        for name in (KEY_HIGH, KEY_LOW):
            keys[name] = np.asarray(marks.field(name))
        parts = np.asarray(marks.field("part"))[new:]
        # The run does not look up parts of its own that stay in force if the function is fast.
        known_now = task.state.known or known
        kept = len(known_now.sources()) - len(known.sources())
        in_kept = int(np.count_nonzero((parts >= 0) & (parts < kept)))
        least = int(np.count_nonzero(is_read))
        key = self._plan.partitions[fragment.partition].key
        counts = (least, least + in_kept + unknown, rows.num_rows - new - in_kept)
        self._computed[key, stage, fragment.index] = counts
        place = stage, None if spec.reuse.partitions else key
        self._keys[place].append(keys[:new][is_read])
        self._known[place].append(keys[new:][parts >= 0])
        task.state.give(Held(rows, new))
        return least and rows.num_rows - int(np.count_nonzero(parts >= 0))
