"""Random pipelines under random edits, faults and kills, against a plain loop.

Every row is accounted for, every output equals that of the loop, no part is computed again after it
was written, no row is computed again whose result is in force, nothing waits for ever, and a run or
promotion that was killed anywhere can be resumed. A branch changes nothing outside of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.simulation import PARTITIONS, Disturbance, Kill, Node, World
from vane_dagster import retries
from vane_dagster.engine import slicing
from vane_dagster.worker import recorded_rows

KINDS = ("project", "map", "map", "map", "flat_map", "filter", "join", "write")


@st.composite
def pipelines(draw: Any) -> list[Node]:
    """Up to five stages; each reads the source, or earlier stages."""
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, 5))):
        name = f"s{number}"
        readable = [node for node in nodes if node.kind != "write"]
        kind = draw(st.sampled_from(KINDS))
        above = draw(st.sampled_from([*readable, None])) if readable else None
        both = [
            node for node in readable if above and node is not above and node.keys == above.keys
        ]
        if (kind in ("join", "write") and above is None) or (kind == "join" and not both):
            kind = "map"
        options: dict[str, Any] = {}
        upstream = (above,) if above else ()
        if kind == "join":
            upstream = (above, draw(st.sampled_from(both)))
        elif kind in ("map", "flat_map", "filter"):
            options = {
                "reuse": draw(st.sampled_from(["rows", "rows", "fragments"])),
                "on_error": draw(st.sampled_from(["quarantine", "quarantine", "raise"])),
            }
            if options["on_error"] == "quarantine":
                options["max_error_rate"] = 1.0
            if options["reuse"] == "rows":
                options["per_row"] = draw(st.booleans())
                options["partitions"] = draw(st.integers(0, 2))
        nodes.append(Node(kind, name, upstream, options))
    return nodes


VALUES = st.one_of(
    st.sampled_from(["a", "b", "a+b", "c+c", "long+er", ""]),
    st.builds("{0}+bad s{1}".format, st.sampled_from("ab"), st.integers(0, 4)),
)
DEADLY = st.builds("d+kill s{0}".format, st.integers(0, 4))
ROWS = st.lists(VALUES, min_size=1, max_size=5)
PARTS = st.sets(st.sampled_from(PARTITIONS), min_size=1)
ORDER = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
SUFFIXES = st.sampled_from([".", "!", "?!"])
NUMBERS = st.integers(0, 60)
SOMEWHERE = st.sampled_from(["request", "answer"])
KILL_OF_FEW = st.none() | st.tuples(st.integers(0, 1), SOMEWHERE)


class Simulation(RuleBasedStateMachine):
    """Edits of a world, and runs between them. All of it may be in a branch, too."""

    @initialize(nodes=pipelines(), rows=st.lists(ROWS, min_size=3, max_size=3))
    def begin(self, nodes: list[Node], rows: list[list[str]]) -> None:
        self.world = World(nodes)
        for partition, values in zip(PARTITIONS, rows):
            self.world.files[partition] = {"a": self.world.new_rows(values)}

    def _file(self, partition: str, number: int) -> list[tuple[str, str]]:
        files = self.world.files[partition]
        return files[sorted(files)[number % len(files)]]

    @rule(partition=st.sampled_from(PARTITIONS), number=st.integers(0, 9), value=VALUES | DEADLY)
    def edit_a_row(self, partition: str, number: int, value: str) -> None:
        rows = self._file(partition, number)
        rows[number % len(rows)] = (rows[number % len(rows)][0], value)

    @rule(partition=st.sampled_from(PARTITIONS), name=st.sampled_from("abc"), values=ROWS)
    def write_a_file(self, partition: str, name: str, values: list[str]) -> None:
        self.world.files[partition][name] = self.world.new_rows(values)

    @rule(partition=st.sampled_from(PARTITIONS), number=st.integers(0, 9))
    def remove_a_row(self, partition: str, number: int) -> None:
        rows = self._file(partition, number)
        if len(rows) > 1:
            del rows[number % len(rows)]

    @rule(partition=st.sampled_from(PARTITIONS), number=st.integers(1, 9))
    def turn_a_file(self, partition: str, number: int) -> None:
        rows = self._file(partition, number)
        rows[:] = rows[number % len(rows) :] + rows[: number % len(rows)]

    @rule(partition=st.sampled_from(PARTITIONS))
    def merge_files(self, partition: str) -> None:
        files = self.world.files[partition]
        self.world.files[partition] = {"m": [row for name in sorted(files) for row in files[name]]}

    @rule(partition=st.sampled_from(PARTITIONS), number=st.integers(0, 9))
    def give_new_ids(self, partition: str, number: int) -> None:
        rows = self._file(partition, number)
        rows[:] = self.world.new_rows([value for _, value in rows])

    @rule(rows=st.integers(1, 6))
    def cut_fragments(self, rows: int) -> None:
        self.world.fragment_rows = rows

    @rule(number=st.integers(0, 4), suffix=SUFFIXES)
    def edit_an_argument(self, number: int, suffix: str) -> None:
        node = self.world.nodes[number % len(self.world.nodes)]
        if node.kind not in ("join", "write") and node.suffix != suffix:
            node.suffix = suffix
            for partition in PARTITIONS:
                self.world.stored[node.name, partition].clear()

    @rule(
        number=st.integers(0, 4),
        suffix=SUFFIXES,
        order=ORDER,
        then=st.sampled_from(["keep", "undo", "edit and undo"]),
    )
    def adopt_an_edit(self, number: int, suffix: str, order: tuple[int, ...], then: str) -> None:
        """It computes nothing, nor does its former definition once it is undone."""
        node, world = self._coded(number), self.world
        if node is None or node.suffix == suffix:
            return
        world.run()
        again = world.run()  # what fails is computed each time
        was_alone = len(world.equal_to(node)) == 1
        former, node.suffix = node.suffix, suffix
        world.adopt(node, former)
        assert world.run(PARTITIONS, Disturbance(order)) <= again
        if then == "undo":
            world.undo(node)
            node.suffix = former
            if was_alone:
                assert world.run(PARTITIONS, Disturbance(order)) <= again
        elif then == "edit and undo":  # parts have rows of both
            for partition in PARTITIONS:
                if number % 2:
                    self.turn_a_file(partition, number)
                self.world.files[partition]["z"] = world.new_rows(["a", "b+c", f"{number}"])
            world.run(PARTITIONS, Disturbance(order))
            world.undo(node)
            world.run()

    @rule(number=st.integers(0, 4), suffix=SUFFIXES, kill=KILL_OF_FEW)
    def adopt(self, number: int, suffix: str, kill: Kill | None) -> None:
        node = self._coded(number)
        if node is not None and node.suffix != suffix:
            self.world.adopt(node, suffix, kill)

    @rule(number=st.integers(0, 4), kill=KILL_OF_FEW)
    def undo(self, number: int, kill: Kill | None) -> None:
        if node := self._coded(number):
            self.world.undo(node, kill)

    def _coded(self, number: int) -> Node | None:
        nodes = [node for node in self.world.nodes if node.calls_code]
        return nodes[number % len(nodes)] if nodes else None

    @rule(number=st.integers(0, 4), suffix=SUFFIXES, partitions=PARTS, order=ORDER)
    def open_a_branch(
        self, number: int, suffix: str, partitions: set[str], order: tuple[int, ...]
    ) -> None:
        """Open one for an edit, and compute some partitions there."""
        self._go((self.world.above or self.world).branch())
        self.edit_an_argument(number, suffix)
        self.run(partitions, order)

    @rule(late=st.sampled_from([1e6, 2e6]), is_above=st.booleans())
    def collect_garbage(self, late: float, is_above: bool) -> None:
        """Here, or in the fallback."""
        if is_above and self.world.above:
            self.world.above.collect(late)
            self._go(self.world)
        else:
            self.world.collect(late)

    @precondition(lambda self: self.world.above or self.world.branches)
    @rule()
    def go_to_the_other_store(self) -> None:
        self._go(self.world.above or self.world.branches[0])

    @precondition(lambda self: self.world.above or self.world.branches)
    @rule(
        kills=st.lists(st.none() | st.tuples(st.integers(0, 150), SOMEWHERE), min_size=1),
        is_up_to_date=st.booleans(),
        deploys=st.booleans(),
    )
    def promote(
        self, kills: list[tuple[int, str] | None], is_up_to_date: bool, deploys: bool
    ) -> None:
        """Promote the branch; a run above then computes nothing that it would not compute here."""
        branch = self.world if self.world.above else self.world.branches[0]
        main, again = branch.above, None
        assert main is not None
        if is_up_to_date:
            branch.run()
            again = branch.run()
        outcome = branch.promote(kills, is_up_to_date and not branch.failed, deploys)
        if outcome == "promoted" and deploys and again is not None:
            assert main.run() <= again
        self._go(self.world)

    def _go(self, world: World) -> None:
        self.world = world
        self.held = world.above.content() if world.above else {}

    @invariant()
    def nothing_of_a_branch_is_outside_of_it(self) -> None:
        if self.world.above:
            assert self.world.above.content() == self.held

    @rule(partitions=PARTS, order=ORDER)
    def run(self, partitions: set[str], order: tuple[int, ...]) -> None:
        self.world.run(sorted(partitions), Disturbance(order))

    @rule(
        partitions=PARTS,
        order=ORDER,
        again=st.sampled_from(["force", "retry_quarantined"]),
    )
    def run_again(self, partitions: set[str], order: tuple[int, ...], again: str) -> None:
        self.world.run(sorted(partitions), Disturbance(order), **{again: True})

    @rule(
        order=ORDER,
        lost=st.none() | st.tuples(NUMBERS, st.sampled_from(["worker", "result"])),
        tables=st.sets(NUMBERS, max_size=2),
        nodes=st.sets(NUMBERS, max_size=5),
        fails=st.dictionaries(NUMBERS.map(lambda n: 3 * n), SOMEWHERE, max_size=4),
    )
    def run_with_faults(
        self,
        order: tuple[int, ...],
        lost: tuple[int, str] | None,
        tables: set[int],
        nodes: set[int],
        fails: dict[int, str],
    ) -> None:
        """Lose any number of nodes, as they count against nothing, and few of all else."""
        losses = {**dict.fromkeys(nodes, "node"), **dict.fromkeys(tables, "table")}
        losses |= dict([lost] if lost else [])
        self.world.run(PARTITIONS, Disturbance(order, losses, fails))

    @rule(order=ORDER, answer=NUMBERS)
    def kill_at_an_answer(self, order: tuple[int, ...], answer: int) -> None:
        self.world.run(PARTITIONS, Disturbance(order, kill_answer=answer))

    @rule(order=ORDER, number=st.integers(0, 250), where=SOMEWHERE)
    def kill_at_an_operation(self, order: tuple[int, ...], number: int, where: str) -> None:
        self.world.run(PARTITIONS, Disturbance(order, kill_operation=(number, where)))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for world in filter(None, (self.world, self.world.above, *self.world.branches)):
                world.run()


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Functions here stand for costly ones, however fast this machine calls them."""
    monkeypatch.setattr(retries, "STORAGE", retries.Backoff(0.0, 0.0))
    monkeypatch.setattr(slicing.SliceSizer, "is_costly", lambda _self, _stage: True)
    (tmp_path / "row_reuse").mkdir()
    monkeypatch.setattr(recorded_rows, "worker_folder", lambda kind: tmp_path / kind)


@pytest.mark.parametrize(("reuse", "force"), [("rows", True), ("fragments", False)])
def test_parts_and_rows_of_both_definitions_are_told_apart(reuse: str, force: bool) -> None:
    """Once they are split, by the comparison that each run ends with; `force` is for both."""
    rows: dict[str, Any] = {"reuse": "rows", "on_error": "quarantine", "per_row": False}
    first = Node("map", "s0", (), rows)
    if reuse == "fragments":
        first.options = {"reuse": reuse, "on_error": "quarantine"}
    world = World([first, Node("map", "s1", (first,), rows)])
    both = ["p0", "p1"]
    world.run(both)
    first.suffix = "!"
    world.adopt(first, ".")
    assert not world.run(both)
    world.files["p0"]["b"] = world.new_rows(["c", "d"])  # "c" is copied, "d" is computed
    world.run(both)
    if force:
        world.run(["p1"], force=True)
    world.undo(first)
    world.run(both)
    first.suffix = "."
    world.run(both)
    world.adopt(first, "!")
    world.run(both)


def test_no_earlier_row_is_copied_into_a_forced_partition_and_others_keep_theirs() -> None:
    options = {"reuse": "rows", "on_error": "quarantine", "per_row": False, "partitions": 1}
    world = World([Node("map", "s0", (), options)])
    world.files["p0"]["a"] = world.new_rows(["d"])
    world.run()
    world.run(["p1"], force=True)
    world.run()
    world.files["p1"]["b"] = world.new_rows(["d"])  # which p0 has from before
    assert world.run() == {("s0", "d")}
    world.files["p1"]["b"] = world.new_rows(["c"])
    world.files["p2"]["a"] = world.new_rows(["a+b", "c"])
    assert not world.run()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # killed
@pytest.mark.parametrize("reuse", ["rows", "fragments"])
def test_what_is_computed_by_force_has_the_name_of_its_own_definition(reuse: str) -> None:
    """Even if a forced run of the definition that it counts as was killed after a part."""
    for answer in (9, 10):  # after a part, before the commit
        options = {"reuse": reuse, "on_error": "quarantine"}
        first = Node("map", "s0", (), options | ({"per_row": False} if reuse == "rows" else {}))
        world = World([first])
        world.fragment_rows = 1
        world.run(["p0"])
        world.run(["p0"], Disturbance(kill_answer=answer), force=True)
        first.suffix = "!"
        world.adopt(first, ".")
        world.run(["p0"], force=True)
        world.undo(first)
        first.suffix = "."
        world.run(["p0"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # killed
@pytest.mark.parametrize("few", [8, 0])
def test_simulation(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """With 0, each copy is one of few rows of a part."""
    monkeypatch.setattr(recorded_rows, "_FEW", few)
    run_state_machine_as_test(
        Simulation,
        settings=settings(
            max_examples=int(os.environ.get("SIMULATIONS", "2")),
            stateful_step_count=12,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
