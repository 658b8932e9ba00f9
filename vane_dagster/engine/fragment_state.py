"""State of one fragment in the stages of a wave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.inputs import stages_read
from vane_dagster.planning.plan import Part
from vane_dagster.storage.batch_records import Recorded
from vane_dagster.storage.manifest import FragmentRecord
from vane_dagster.worker.protocol import RowLookup
from vane_dagster.worker.reports import Tally

TaskKind = Literal["load", "slice", "gather", "whole"]
"""Kind of task: load a map's input, compute a slice, gather the output, or all at once."""


@dataclass(frozen=True)
class Held:
    """A table in shared memory.

    Attributes:
        table: The reference.
        rows: Number of rows; of a map's input of those that are computed, the first ones.
        bytes: Its size; 0 if it is counted elsewhere.
    """

    table: Any
    rows: int
    bytes: int = 0


@dataclass
class StageTaskState:
    """A stage of one fragment that is being computed.

    Attributes:
        spec: The stage.
        waits_for: Stages that it reads, without rows yet.
        started: Whether its work was queued.
        done: Whether its part is written.
        table: Its rows while a reader needs them.
        given: For a map: the input rows.
        known: For a map: where its rows are looked up.
        rows_left: For a map: unassigned input rows, the last ones.
        pieces: For a map: outputs of its slices, by first input row.
        slices_in_flight: Slices in flight.
        tally: For a map: counts of the rows of its slices.
        pending: For a map: what its slices wait for from batches.
    """

    spec: StageSpec
    waits_for: set[str]
    started: bool = False
    done: bool = False
    table: Held | None = None
    given: Held | None = None
    known: RowLookup | None = None
    rows_left: int = 0
    pieces: dict[int, Held] = field(default_factory=dict)
    slices_in_flight: int = 0
    tally: Tally = field(default_factory=Tally)
    pending: list[Recorded] = field(default_factory=list)

    def give(self, given: Held) -> None:
        """Set a map's input."""
        self.given, self.rows_left = given, given.rows

    @property
    def held(self) -> int:
        """Bytes in shared memory."""
        tables = (self.given, self.table, *self.pieces.values())
        return sum(each.bytes for each in tables if each is not None)


@dataclass
class FragmentState:
    """One fragment of one partition in progress.

    Attributes:
        partition: Index of the partition in the plan.
        index: Index of the fragment in the partition.
        record: Its files and rows.
        task_states: Its stages to compute, upstream first.
        epoch: Incremented when it starts over, which identifies late answers.
        bytes_read: Bytes of the parts that it reads first.
        known: Where rows are looked up, by stage, apart from the parts that this run has written.
        unreadable: Names of damaged files in which no rows are looked up any more.
        is_suspect: Whether it may have ended a worker: its calls are then alone at theirs.
    """

    partition: int
    index: int
    record: FragmentRecord
    task_states: dict[str, StageTaskState]
    epoch: int = 0
    bytes_read: int = 0
    known: dict[str, RowLookup] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    is_suspect: bool = False

    @property
    def rows(self) -> int:
        """The number of its source rows."""
        return self.record.rows

    @property
    def place(self) -> tuple[int, int]:
        """Its partition and its index there; the smallest goes first everywhere."""
        return self.partition, self.index

    def is_arranged(self, spec: StageSpec) -> bool:
        """Whether a map's input is arranged before its rows are assigned to workers."""
        return spec.row_order is not None or spec.name in self.known

    def expects_new_rows(self, stage: str) -> bool:
        """Whether a map has no earlier results, so that all of its rows are likely to be new."""
        known = self.known.get(stage)
        return known is None or not known.sources()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to compute."""
        return all(task_state.done for task_state in self.task_states.values())

    def start_over(self, pipeline: Pipeline) -> None:
        """Discard everything but written parts."""
        self.epoch += 1
        unfinished = [each.spec for each in self.task_states.values() if not each.done]
        self.task_states = make_task_states(pipeline, unfinished)

    def abandon(self, stages: set[str]) -> None:
        """Give up stages, and release the inputs that only they needed."""
        for name in stages & set(self.task_states):
            del self.task_states[name]
        self.let_go()

    @property
    def held(self) -> int:
        """Bytes of its tables in shared memory."""
        return sum(task_state.held for task_state in self.task_states.values())

    def is_read(self, stage: str) -> bool:
        """Whether a stage that is not done reads the rows of another one."""
        return any(
            stage in each.spec.upstream for each in self.task_states.values() if not each.done
        )

    def let_go(self) -> None:
        """Release the rows that no stage reads any more."""
        for stage, task_state in self.task_states.items():
            if task_state.table is not None and not self.is_read(stage):
                task_state.table = None


def make_task_states(pipeline: Pipeline, specs: Sequence[StageSpec]) -> dict[str, StageTaskState]:
    """Create task states for stages, upstream first.

    A stage also waits for those whose quarantine or row records it reads.
    """
    names = {spec.name for spec in specs}
    return {
        spec.name: StageTaskState(spec, {*stages_read(pipeline, spec)} & names) for spec in specs
    }


def input_id(pipeline: Pipeline, stage: str) -> str:
    """Return the column of a stage's output that has the ids of its input rows."""
    return pipeline._key_columns(stage)[1 if pipeline[stage].spec.makes_rows else 0]


def bytes_read(
    parts: Mapping[tuple[int, str], Mapping[int, Part]],
    partition: int,
    fragment: int,
    specs: Sequence[StageSpec],
) -> int:
    """Bytes of the upstream parts that stages read for a fragment and do not compute themselves."""
    made = {spec.name for spec in specs}
    read = {upstream for spec in specs for upstream in spec.upstream} - made - {SOURCE}
    return sum(parts[partition, stage][fragment].info.bytes for stage in read)
