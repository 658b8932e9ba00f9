"""One fragment on its way through the stages of a wave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vane_dagster.engine.run_state import RunState
from vane_dagster.pipeline.options import RowOrder
from vane_dagster.pipeline.specs import SOURCE, StageSpec
from vane_dagster.planning.plan import Part
from vane_dagster.storage.manifest import FragmentRecord
from vane_dagster.worker.protocol import Tally

TaskKind = Literal["load", "slice", "gather", "whole"]
"""What a task does: load a map's input, compute rows of it, gather its output, or all at once."""


@dataclass
class StageTaskState:
    """A stage of one fragment that is being computed.

    Attributes:
        spec: The stage.
        waits_for: Stages above it whose rows are not there yet.
        readers: Stages below it in the wave that still need its rows.
        started: Whether its work was queued.
        done: Whether its part is written.
        table: Reference to its rows while a reader needs them.
        given: For a map: reference to the input's rows, and how many.
        left: First and last row but one of what no worker was handed yet, by share.
        pieces: For a map: outputs of its slices, by first row.
        slices_in_flight: Slices at work.
        table_rows: Rows of `table`.
        given_bytes: For a map: bytes of `given`, where it was loaded for it.
        piece_bytes: Bytes of `pieces`.
        table_bytes: Bytes of `table`, or of what it was before it was dropped.
        dropped: Whether `table` was dropped while readers need it, who read the part instead.
        tally: For a map: what became of the rows of its slices.
    """

    spec: StageSpec
    waits_for: set[str]
    readers: int
    started: bool = False
    done: bool = False
    table: Any = None
    table_rows: int = 0
    given: Any = None
    given_rows: int = 0
    left: list[tuple[int, int]] = field(default_factory=list)
    pieces: dict[int, tuple[Any, int]] = field(default_factory=dict)
    slices_in_flight: int = 0
    tally: Tally = field(default_factory=Tally)
    given_bytes: int = 0
    piece_bytes: int = 0
    table_bytes: int = 0
    dropped: bool = False

    def give(self, table: Any, rows: int, shares: Sequence[int] = ()) -> None:
        """Takes a map's input in, of so many rows, and where the rows of each share end."""
        self.given, self.given_rows = table, rows
        ends = shares or (rows,)
        self.left = list(zip((0, *ends), ends))

    @property
    def rows_left(self) -> int:
        """For a map: rows of its input that no worker was handed yet."""
        return sum(stop - start for start, stop in self.left)

    def take(self, share: int, rows: Callable[[int], int]) -> tuple[int, int]:
        """Takes rows of a share, or the last ones of the largest if it has none left.

        Args:
            share: The share; counted round.
            rows: How many rows to take of so many.

        Returns:
            The first row, and the one after the last.
        """
        place = share % len(self.left)
        start, stop = self.left[place]
        if start < stop:
            end = start + rows(stop - start)
            self.left[place] = (end, stop)
            return start, end
        place = max(range(len(self.left)), key=lambda i: self.left[i][1] - self.left[i][0])
        start, stop = self.left[place]
        begin = stop - rows(stop - start)
        self.left[place] = (start, begin)
        return begin, stop

    @property
    def held(self) -> int:
        """Bytes that it has in shared memory."""
        given = self.given_bytes if self.given is not None else 0
        pieces = self.piece_bytes if self.pieces else 0
        return given + pieces + (self.table_bytes if self.table is not None else 0)


@dataclass
class FragmentState:
    """One fragment of one partition under way.

    Attributes:
        order: Place in the run; the smallest goes first everywhere.
        partition: Index of the partition in the plan.
        index: Index of the fragment in the partition.
        fragment: The fragment.
        task_states: What is computed for it, upstream first.
        epoch: Raised when it starts over, so that late answers are known as such.
        restarts: How often it started over after a worker or its data was lost.
        bytes_read: Bytes of the parts that it begins with.
        peak: The most bytes that its tables had at a time, those included that were dropped.
        suspects: Stages that it goes through in slices, because a worker died at it.
        losses: Workers that a row has ended, by stage and row.
        row_retries: Former parts of which the failed rows alone are computed, by stage.
        claimed: The claims that the run holds on its stages, by stage.
    """

    order: int
    partition: int
    index: int
    fragment: FragmentRecord
    task_states: dict[str, StageTaskState]
    epoch: int = 0
    restarts: int = 0
    bytes_read: int = 0
    peak: int = 0
    suspects: set[str] = field(default_factory=set)
    losses: dict[tuple[str, int], int] = field(default_factory=dict)
    row_retries: dict[str, Part] = field(default_factory=dict)
    claimed: dict[str, bytes] = field(default_factory=dict)

    def order_of(self, spec: StageSpec) -> RowOrder | None:
        """In which order workers are given a map's rows; None for the rows' own."""
        row_retries = spec.name in self.row_retries
        return None if row_retries else spec.row_order

    @property
    def finished(self) -> bool:
        """Whether nothing is left to compute."""
        return all(task_state.done for task_state in self.task_states.values())

    def start_over(self, counts: bool = True) -> None:
        """Forgets everything but written parts; `counts` where it may be its own fault."""
        self.epoch += 1
        self.restarts += counts
        unfinished = {
            name: task_state for name, task_state in self.task_states.items() if not task_state.done
        }
        self.task_states = make_task_states([task_state.spec for task_state in unfinished.values()])

    def abandon(self, stages: set[str]) -> None:
        """Gives up stages; what they alone needed may go."""
        for name in stages & set(self.task_states):
            task_state = self.task_states.pop(name)
            for upstream in task_state.spec.upstream:
                if not task_state.done and upstream in self.task_states:
                    self.read(upstream)

    @property
    def held(self) -> int:
        """Bytes of its tables in shared memory."""
        return sum(task_state.held for task_state in self.task_states.values())

    @property
    def dropped(self) -> int:
        """Bytes of the tables that were dropped and are still to be read from their parts."""
        task_states = self.task_states.values()
        return sum(
            task_state.table_bytes
            for task_state in task_states
            if task_state.dropped and task_state.readers
        )

    def hold(self, stage: str, kind: TaskKind, table_bytes: int) -> None:
        """Takes in the bytes of a table that came back, beside those that it was made from."""
        self.peak = max(self.peak, self.held + self.dropped + table_bytes)
        task_state = self.task_states[stage]
        if kind == "load":
            task_state.given_bytes = table_bytes
        elif kind == "slice":
            task_state.piece_bytes += table_bytes
        else:
            task_state.table_bytes = table_bytes

    def droppable(self) -> list[str]:
        """Stages whose rows are only needed by stages that wait for others as well."""
        return [
            name
            for name, task_state in self.task_states.items()
            if task_state.table is not None
            and all(
                reader.waits_for and not reader.started
                for reader in self.task_states.values()
                if name in reader.spec.upstream and not reader.done
            )
        ]

    def drop(self, stage: str) -> int:
        """Drops a stage's rows, which are read from its part again; gives their bytes."""
        task_state = self.task_states[stage]
        task_state.table, task_state.dropped = None, True
        return task_state.table_bytes

    def read(self, stage: str) -> None:
        """One reader of a stage's rows needs them no more."""
        task_state = self.task_states[stage]
        task_state.readers -= 1
        if task_state.readers == 0:
            task_state.table = None


def make_task_states(specs: Sequence[StageSpec]) -> dict[str, StageTaskState]:
    """Nodes for stages, upstream first, each with its readers among them counted."""
    names = {spec.name for spec in specs}
    readers = [upstream for spec in specs for upstream in spec.upstream]
    return {
        spec.name: StageTaskState(spec, set(spec.upstream) & names, readers.count(spec.name))
        for spec in specs
    }


def to_compute(
    state: RunState, stages: Sequence[str], partition: int, index: int
) -> list[StageSpec]:
    """Of a wave's stages those that are missing of a fragment and not given up, upstream first."""
    if (partition, index) in state.damaged:
        return []
    planned = state.plan.partitions[partition]
    return [
        state.pipeline[stage].spec
        for stage in stages
        if not planned.stages[stage].done
        and index not in state.parts[partition, stage]
        and (partition, stage) not in state.failed
    ]


def fragment_state(
    state: RunState, specs: Sequence[StageSpec], order: int, partition: int, index: int
) -> FragmentState:
    """A fragment on its way through stages, of which it has no parts."""
    planned = state.plan.partitions[partition]
    names = {spec.name for spec in specs}
    # Where what a stage reads is computed too, all of its rows are.
    row_retries = {
        spec.name: planned.stages[spec.name].row_retries[index]
        for spec in specs
        if index in planned.stages[spec.name].row_retries and not names & set(spec.upstream)
    }
    task_states = make_task_states(specs)
    run = FragmentState(
        order, partition, index, planned.fragments[index], task_states, row_retries=row_retries
    )
    run.bytes_read = bytes_read(state.parts, partition, index, specs)
    return run


def bytes_read(
    parts: Mapping[tuple[int, str], Mapping[int, Part]],
    partition: int,
    fragment: int,
    specs: Sequence[StageSpec],
) -> int:
    """Bytes of the parts that stages read of a fragment, of which they compute none themselves."""
    made = {spec.name for spec in specs}
    read = {upstream for spec in specs for upstream in spec.upstream} - made - {SOURCE}
    return sum(parts[partition, stage][fragment].info.bytes for stage in read)
