"""From a row of a stage back to the source, through the manifests that were really used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import StoreError, TraceError
from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.row_search import Found, find
from vane_dagster.tracing.manifest_index import Book, aligned, as_id, fragment_index
from vane_dagster.tracing.missing import not_found
from vane_dagster.tracing.step_records import source_step, stage_step
from vane_dagster.tracing.steps import SHOWN, Step, Trace
from vane_dagster.tracing.upstream_rows import beyond

_Node = tuple[str, str]


@dataclass
class _Asked:
    """Rows of a stage that are wanted: by the position of a key and its values, and the part."""

    index: int | None
    by: dict[int, dict[Any, Sequence[Any] | None]] = field(default_factory=dict)


def trace_back(book: Book, stage: str, id: Any) -> Trace:
    """A row's way back, on through the pipelines whose rows are the source of others.

    Raises:
        TraceError: If there is no such stage, partition or row.
        StoreError: If the row's own part is gone or cannot be read.
    """
    if stage == SOURCE:
        raise TraceError(
            f"{book.label(stage)!r} is where every trace ends; ask for a stage's row, or trace "
            "forward from here"
        )
    name, manifest = book.require(stage)
    key = as_id(
        id, manifest.schema.field(manifest.keys[0]).type, book.label(stage), manifest.keys[0]
    )
    try:
        located = book.locate(manifest, key)
    except FileNotFoundError as error:
        raise StoreError(
            f"{book.label(stage)!r}: a part of its manifest {name} is gone: {error}. Materialize "
            "it again"
        ) from error
    if located is None:
        raise not_found(book, manifest, key)
    walk = _Walk(book)
    walk.visit((stage, name), located[0], [located[1]])
    shown = tuple(reversed(walk.steps))
    return Trace(book.label(stage), book.partition, key, False, shown, walk.omitted)


class _Walk:
    """Goes from stage to stage, a stage after all that were made of it."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.steps: list[Step] = []
        self.omitted: dict[str, int] = {}
        self._asked: dict[_Node, _Asked] = {}
        self._source: dict[tuple[str, int, Any], tuple[Manifest, int, Any]] = {}

    def visit(self, node: _Node, index: int, found: Sequence[Found]) -> None:
        """Begins at rows that are known."""
        for number, current in enumerate(self._order(node)):
            manifest = self._book.open(*current)
            if number == 0:
                assert manifest is not None
                self._add([self._step(current, manifest, index, row) for row in found])
                self._ask(manifest, index, [row.keys for row in found])
            elif current in self._asked:
                self._look(current, manifest, self._asked[current])
        sources = [source_step(self._book, *asked) for asked in self._source.values()]
        self._add(sources)
        for step in sources:
            self._go_on(step)

    def _go_on(self, step: Step) -> None:
        """Follows a row of the source that is a row of another pipeline."""
        if (other := beyond(self._book, step)) is None:
            return
        walk = _Walk(other.book)
        walk.visit((other.manifest.stage, other.name), other.index, [other.found])
        self.steps += walk.steps
        self.omitted |= walk.omitted

    def _order(self, first: _Node) -> list[_Node]:
        """The nodes above one, each after all that read it."""
        done: dict[_Node, None] = {}

        def go(node: _Node) -> None:
            if node in done:
                return
            manifest = self._book.open(*node)
            for upstream in manifest.upstream.items() if manifest else ():
                go(upstream)
            done[node] = None

        go(first)
        return list(reversed(done))

    def _ask(self, manifest: Manifest, index: int, rows: Sequence[Sequence[Any]]) -> None:
        """Asks the stages above for what some rows were made from."""
        fragment = manifest.fragments[index]
        for upstream in manifest.reads:
            if upstream == SOURCE:
                self._ask_source(manifest, index, rows)
                continue
            node = (upstream, manifest.upstream[upstream])
            above = self._book.open(*node)
            where = fragment_index(above, fragment, index) if above else None
            asked = self._asked.setdefault(node, _Asked(where))
            if above is None or where is None:
                asked.by.setdefault(0, {})
                self._ask_source(manifest, index, rows)
                continue
            position, wanted = aligned(rows, len(manifest.keys), len(above.keys))
            asked.by.setdefault(position, {}).update(wanted)

    def _ask_source(self, manifest: Manifest, index: int, rows: Sequence[Sequence[Any]]) -> None:
        for row in rows:
            place = (manifest.fragments[index].identity, index, row[-1])
            self._source.setdefault(place, (manifest, index, row[-1]))

    def _look(self, node: _Node, manifest: Manifest | None, asked: _Asked) -> None:
        """Looks rows up that stages below asked for, and asks on."""
        if manifest is None or asked.index is None:
            note = (
                f"its manifest {node[1]} was collected, so this step is not known any more"
                if manifest is None
                else f"its manifest {node[1]} has other fragments than what was made from it"
            )
            self._add([Step(self._book.label(node[0]), "", self._book.partition, notes=(note,))])
            return
        found: dict[int, Found] = {}
        known: list[Sequence[Any]] = []
        lost = ""
        for position, wanted in asked.by.items():
            try:
                for file in self._book.rows_of(manifest, asked.index):
                    hits = find(file, manifest.keys, position, wanted, unique=position == 0)
                    found.update({hit.row: hit for hit in hits})
            except (FileNotFoundError, StoreError) as error:
                lost = f"the part is gone or cannot be read: {error}"
                known += [keys for keys in wanted.values() if keys is not None]
        rows = [found[row] for row in sorted(found)]
        steps = [self._step(node, manifest, asked.index, row) for row in rows[:SHOWN]]
        if lost:
            steps += [
                stage_step(self._book, manifest, node[1], asked.index, None, keys, [lost])
                for keys in known[:SHOWN] or [()]
            ]
        elif not rows:
            note = "no row here: it was joined with none"
            steps = [stage_step(self._book, manifest, node[1], asked.index, None, (), [note])]
        self._add(steps)
        if len(rows) > SHOWN:
            label = self._book.label(node[0])
            self.omitted[label] = self.omitted.get(label, 0) + len(rows) - SHOWN
        self._ask(manifest, asked.index, [*(row.keys for row in rows), *known])

    def _step(self, node: _Node, manifest: Manifest, index: int, found: Found) -> Step:
        return stage_step(self._book, manifest, node[1], index, found)

    def _add(self, steps: Sequence[Step]) -> None:
        """Keeps steps so that they stand in the order of their rows when all are reversed."""
        self.steps += reversed(steps)
