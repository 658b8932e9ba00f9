"""From a row to everything made of it, by the manifests in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vane_dagster.errors import StoreError, TraceError
from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.storage.manifest import FragmentRecord, Manifest
from vane_dagster.storage.row_search import Found, find
from vane_dagster.tracing.manifest_index import Book, aligned, as_id, file_of, fragment_index
from vane_dagster.tracing.missing import (
    leaving,
    looked_at,
    not_found,
    search_changed,
    search_source,
)
from vane_dagster.tracing.step_records import source_step, stage_step
from vane_dagster.tracing.steps import SHOWN, Step, Trace


@dataclass(frozen=True)
class _Reached:
    """What a stage has of the row.

    Attributes:
        keys: How many keys its rows have.
        rows: Its rows, by their keys.
        passed: Keys that its rows would have had, to look for below it where that was made from
            another materialization of it.
    """

    keys: int
    rows: Sequence[Sequence[Any]]
    passed: Sequence[Sequence[Any]] = ()


def trace_forward(book: Book, stage: str, id: Any) -> Trace:
    """What was made of a row of a stage, or of the source.

    Raises:
        TraceError: If there is no such stage, partition or row.
        StoreError: If the row's own part is gone or cannot be read.
    """
    if stage == SOURCE:
        return _from_source(book, id)
    name, manifest = book.require(stage)
    key = _converted(book, manifest, 0, stage, id)
    located = book.locate(manifest, key)
    if located is None:
        raise not_found(book, manifest, key)
    index, found = located
    walk = _Walk(book, manifest.fragments[index], index)
    walk.steps.append(stage_step(book, manifest, name, index, found))
    walk.reached[stage] = _Reached(len(manifest.keys), [found.keys])
    return walk.trace(stage, key)


def _from_source(book: Book, id: Any) -> Trace:
    heads = []
    for stage in book.stages:
        found = book.in_force(stage)
        if found and found[1].keys and SOURCE in found[1].reads:
            heads.append(found[1])
    if not heads:
        shapes = ((stage, book.shape(stage)) for stage in book.stages)
        book.require(next((s for s, shape in shapes if shape and SOURCE in shape.reads), SOURCE))
    heads.sort(key=lambda head: -head.committed_at)
    newest = heads[0]
    key = _converted(book, newest, -1, SOURCE, id)
    index = next(
        (i for head in heads if (i := _index_by_part(book, newest, head, key)) is not None), None
    )
    if index is None:
        try:
            hit = search_source(book, newest, key)
        except (FileNotFoundError, StoreError) as error:
            raise TraceError(
                f"{book.label(SOURCE)!r} has no row with id {key!r} that a stage has kept, and its "
                f"files cannot be searched: {error}"
            ) from error
        recorded = hit and file_of(newest, hit.url)
        if hit is None or (recorded and book.changed(recorded)):
            return _changed(book, newest, key)
        index = hit.index
    walk = _Walk(book, newest.fragments[index], index)
    walk.steps.append(source_step(book, newest, index, key))
    walk.reached[SOURCE] = _Reached(1, [(key,)])
    return walk.trace(SOURCE, key)


def _index_by_part(book: Book, newest: Manifest, head: Manifest, key: Any) -> int | None:
    """The fragment of the row, where a stage that reads the source has kept it."""
    if len(head.keys) != 1:
        return None
    try:
        located = book.locate(head, key)
    except (FileNotFoundError, StoreError):
        return None
    return (
        None if located is None else fragment_index(newest, head.fragments[located[0]], located[0])
    )


def _changed(book: Book, manifest: Manifest, key: Any) -> Trace:
    """The trace of a row that came into a source file after it was read."""
    hit = search_changed(book, manifest, key)
    where = "" if book.partition is None else f", partition {book.partition!r}"
    if hit is None:
        raise TraceError(
            f"{book.label(SOURCE)!r}{where} has no row with id {key!r} in {looked_at(manifest)}, "
            "which the stages were made from"
        )
    note = "the file was changed since it was read"
    step = Step(
        book.label(SOURCE), SOURCE, book.partition, {book.source_id(manifest): key},
        hit[0].url, hit[1], notes=(note,),
    )  # fmt: skip
    reason = "made from an older version of the source; materialize it again"
    missing = {book.label(stage): reason for stage in book.stages}
    return Trace(book.label(SOURCE), book.partition, key, True, (step,), {}, missing)


def _converted(book: Book, manifest: Manifest, position: int, stage: str, id: Any) -> Any:
    column = manifest.keys[position]
    return as_id(id, manifest.schema.field(column).type, book.label(stage), column)


class _Walk:
    """Goes down from stage to stage, each after all that it reads."""

    def __init__(self, book: Book, fragment: FragmentRecord, index: int) -> None:
        self._book, self._fragment, self._index = book, fragment, index
        self.steps: list[Step] = []
        self.omitted: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        self.reached: dict[str, _Reached] = {}

    def trace(self, stage: str, id: Any) -> Trace:
        """Goes down all stages, and gives what was found."""
        for below in self._below(stage):
            self._look(below)
        return Trace(
            self._book.label(stage), self._book.partition, id, True, tuple(self.steps),
            self.omitted, self.missing,
        )  # fmt: skip

    def _below(self, first: str) -> list[str]:
        """The stages that read another one directly or not, each after what it reads."""
        shapes = {stage: self._book.shape(stage) for stage in self._book.stages}
        reads = {s: tuple(m.reads) for s, m in shapes.items() if m is not None}
        order: dict[str, bool] = {first: True}

        def go(stage: str) -> bool:
            if stage not in order:
                order[stage] = False
                above = [go(upstream) for upstream in reads.get(stage, ())]
                lies_below = any(above)
                del order[stage]
                order[stage] = lies_below
            return order[stage]

        for stage in reads:
            go(stage)
        return [stage for stage, lies_below in order.items() if lies_below and stage != first]

    def _look(self, stage: str) -> None:
        label = self._book.label(stage)
        in_force = self._book.in_force(stage)
        shape = in_force[1] if in_force else self._book.shape(stage)
        assert shape is not None, "a stage below has a manifest that says what it reads"
        above = {u: self.reached[u] for u in shape.reads if u in self.reached}
        passed = self._wanted(shape, above, set(above))
        known = [keys for wanted in passed.values() for keys in wanted.values() if keys is not None]
        self.reached[stage] = _Reached(len(shape.keys), (), known)
        if in_force is None:
            self.missing[label] = (
                "not materialized yet"
                if self._book.partition is None
                else f"not materialized yet in partition {self._book.partition}"
            )
            return
        name, manifest = in_force
        index = fragment_index(manifest, self._fragment, self._index)
        if index is None:
            self.missing[label] = "made from another version of the source; materialize it again"
            return
        stale = {u for u in above if u != SOURCE and not self._is_of(manifest, u)}
        wanted = self._wanted(manifest, above, stale)
        try:
            rows = self._rows(manifest, index, wanted)
        except (FileNotFoundError, StoreError) as error:
            self.missing[label] = f"its part is gone or cannot be read: {error}"
            return
        if not rows:
            self.missing[label] = self._reason(manifest, index, above, stale)
            return
        notes = [
            f"made from an older {self._book.label(u)}; materialize it again" for u in sorted(stale)
        ]
        self.reached[stage] = _Reached(len(manifest.keys), [row.keys for row in rows])
        self.steps += [
            stage_step(self._book, manifest, name, index, row, (), notes) for row in rows[:SHOWN]
        ]
        if len(rows) > SHOWN:
            self.omitted[label] = len(rows) - SHOWN

    def _is_of(self, manifest: Manifest, upstream: str) -> bool:
        """Whether a manifest was made from the one in force of a stage above."""
        in_force = self._book.in_force(upstream)
        return in_force is not None and manifest.upstream.get(upstream) == in_force[0]

    def _wanted(
        self, manifest: Manifest, above: dict[str, _Reached], guessed: set[str]
    ) -> dict[int, dict[Any, Sequence[Any] | None]]:
        """What to look for in a stage, by the position of a key; of some by guess, too."""
        wanted: dict[int, dict[Any, Sequence[Any] | None]] = {}
        for upstream, reached in above.items():
            rows = reached.rows or (reached.passed if upstream in guessed else ())
            position, values = aligned(rows, reached.keys, len(manifest.keys))
            wanted.setdefault(position, {}).update(values)
        return wanted

    def _rows(
        self,
        manifest: Manifest,
        index: int,
        wanted: dict[int, dict[Any, Sequence[Any] | None]],
    ) -> list[Found]:
        found: dict[tuple[str, int], Found] = {}
        if not manifest.parts[index].rows:
            return []
        for position, values in wanted.items():
            for file in self._book.rows_of(manifest, index):
                for hit in find(file, manifest.keys, position, values, unique=position == 0):
                    found[hit.file.url, hit.row] = hit
        return [found[place] for place in sorted(found)]

    def _reason(
        self, manifest: Manifest, index: int, above: dict[str, _Reached], stale: set[str]
    ) -> str:
        if stale:
            older = ", ".join(self._book.label(u) for u in sorted(stale))
            return f"nothing; it was made from an older {older}"
        if lacking := [self._book.label(u) for u, reached in above.items() if not reached.rows]:
            return f"nothing, as {', '.join(lacking)} has nothing of it"
        ids = {keys[0] for reached in above.values() for keys in reached.rows}
        return leaving(self._book, manifest, index, ids)
