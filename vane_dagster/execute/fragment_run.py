"""One fragment on its way through the stages of a wave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.commit.manifest import FragmentRecord
from vane_dagster.declare.stage import StageSpec
from vane_dagster.execute.run_state import RunState
from vane_dagster.execute.work import Tally
from vane_dagster.plan.plan import Part


@dataclass
class Node:
    """A stage of one fragment that is being computed.

    Attributes:
        spec: The stage.
        waits_for: Stages above it whose rows are not there yet.
        readers: Stages below it in the wave that still need its rows.
        started: Whether its work was queued.
        done: Whether its part is written.
        table: Reference to its rows while a reader needs them.
        given: For a map: reference to the input's rows, and how many.
        handed: Rows of the input that were handed to workers.
        pieces: For a map: outputs of its slices, by first row.
        flying: Slices at work.
        table_rows: Rows of `table`.
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
    handed: int = 0
    pieces: dict[int, tuple[Any, int]] = field(default_factory=dict)
    flying: int = 0
    tally: Tally = field(default_factory=Tally)


@dataclass
class FragmentRun:
    """One fragment of one partition under way.

    Attributes:
        order: Place in the run; the smallest goes first everywhere.
        partition: Index of the partition in the plan.
        index: Index of the fragment in the partition.
        fragment: The fragment.
        nodes: What is computed for it, upstream first.
        epoch: Raised when it starts over, so that late answers are known as such.
        restarts: How often it started over after a worker or its data was lost.
        held: Bytes of all tables that it became.
        suspects: Stages that it goes through in slices, because a worker died at it.
        losses: Workers that a row has ended, by stage and row.
        mends: Former parts of which the failed rows alone are computed, by stage.
    """

    order: int
    partition: int
    index: int
    fragment: FragmentRecord
    nodes: dict[str, Node]
    epoch: int = 0
    restarts: int = 0
    held: int = 0
    suspects: set[str] = field(default_factory=set)
    losses: dict[tuple[str, int], int] = field(default_factory=dict)
    mends: dict[str, Part] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to compute."""
        return all(node.done for node in self.nodes.values())

    def start_over(self, counts: bool = True) -> None:
        """Forgets everything but written parts; `counts` where it may be its own fault."""
        self.epoch += 1
        self.restarts += counts
        self.held = 0
        unfinished = {name: node for name, node in self.nodes.items() if not node.done}
        self.nodes = make_nodes([node.spec for node in unfinished.values()])

    def abandon(self, stages: set[str]) -> None:
        """Gives up stages; what they alone needed may go."""
        for name in stages & set(self.nodes):
            node = self.nodes.pop(name)
            for upstream in node.spec.upstream:
                if not node.done and upstream in self.nodes:
                    self.read(upstream)

    def read(self, stage: str) -> None:
        """One reader of a stage's rows needs them no more."""
        node = self.nodes[stage]
        node.readers -= 1
        if node.readers == 0:
            node.table = None


def make_nodes(specs: Sequence[StageSpec]) -> dict[str, Node]:
    """Nodes for stages, upstream first, each with its readers among them counted."""
    names = {spec.name for spec in specs}
    readers = [upstream for spec in specs for upstream in spec.upstream]
    return {
        spec.name: Node(spec, set(spec.upstream) & names, readers.count(spec.name))
        for spec in specs
    }


def to_compute(state: RunState, stages: Sequence[str]) -> Iterator[FragmentRun]:
    """The fragments of which some of a wave's stages are missing and not given up."""
    order = 0
    for index, partition in enumerate(state.plan.partitions):
        for i, fragment in enumerate(partition.fragments):
            specs = [
                state.pipeline[stage].spec
                for stage in stages
                if not partition.stages[stage].done
                and i not in state.parts[index, stage]
                and (index, i) not in state.aside
                and (index, stage) not in state.failed
            ]
            if not specs:
                continue
            order += 1
            names = {spec.name for spec in specs}
            # Where what a stage reads is computed too, all of its rows are.
            mends = {
                spec.name: partition.stages[spec.name].mends[i]
                for spec in specs
                if i in partition.stages[spec.name].mends and not names & set(spec.upstream)
            }
            yield FragmentRun(order, index, i, fragment, make_nodes(specs), mends=mends)
