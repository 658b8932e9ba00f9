"""Traces: from a row back to its source, and forward to all that was made of it.

The way back goes through the manifests that were really used, the way forward through those in
force. Where a source is the rows of another pipeline, the way back goes on in that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import StoreError, TraceError
from vane_dagster.pipeline.specs import SOURCE
from vane_dagster.storage.filesystem import Location, protocol_of
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, Manifest, ManifestName
from vane_dagster.storage.row_search import Found, RowFile, find, row_at
from vane_dagster.tracing.manifest_index import Book, aligned, as_id, file_of, fragment_index
from vane_dagster.tracing.missing import (
    leaving,
    looked_at,
    not_found,
    search_changed,
    search_source,
)
from vane_dagster.tracing.steps import SHOWN, Step, Trace

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
    walk = _BackwardWalk(book)
    walk.visit((stage, name), located[0], [located[1]])
    shown = tuple(reversed(walk.steps))
    return Trace(book.label(stage), book.partition, key, False, shown, walk.omitted)


class _BackwardWalk:
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
        walk = _BackwardWalk(other.book)
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


def stage_step(
    book: Book,
    manifest: Manifest,
    name: str,
    index: int,
    found: Found | None,
    keys: Sequence[Any] = (),
    notes: Sequence[str] = (),
) -> Step:
    """The step of a row in a part.

    Args:
        book: Where the manifest comes from.
        manifest: The manifest.
        name: Its name.
        index: The part.
        found: The row; None if it could not be looked up.
        keys: Its keys as far as they are known otherwise.
        notes: What else there is to say.
    """
    made = manifest.parts[index].made
    keys = found.keys if found else keys
    published = book.published(manifest, index, found) if found else None
    if found and isinstance(published, tuple):
        found = Found(published[0], published[1], found.keys)
    return Step(
        stage=book.label(manifest.stage),
        kind=manifest.kind,
        partition=manifest.partition,
        keys=dict(zip(manifest.keys, keys)),
        url=found.file.url if found else "",
        row=found.row if found else None,
        reads=tuple(manifest.reads),
        manifest=name,
        run_id=made.run_id if made else "",
        committed_by=manifest.run_id,
        code_version=manifest.definition,
        model=manifest.model.get("name", ""),
        pool=manifest.model.get("pool", ""),
        workers=made.workers if made else (),
        at=made.at if made else None,
        seconds=made.seconds if made else None,
        published=_urls(published),
        notes=tuple(notes),
    )


def _urls(published: tuple[RowFile, int] | list[str] | None) -> tuple[str, ...]:
    if isinstance(published, tuple):
        return (published[0].url,)
    return tuple(published or ())


def source_step(book: Book, manifest: Manifest, index: int, id: Any) -> Step:
    """The step of a row in its source file, as a manifest recorded the file.

    What has become of the file since is a note.
    """
    fragment = manifest.fragments[index]
    column = book.source_id(manifest)
    span = _file_with(book, manifest, fragment, id)
    recorded = file_of(manifest, span.url)
    note = book.changed(recorded) if recorded else None
    row = None
    if note is None:
        try:
            hit = book.find_in_source(manifest, [span], id)
            row = hit[1] if hit else None
            note = None if hit else f"no such row in {_rows(span, fragment)}"
        except (FileNotFoundError, StoreError) as error:
            note = f"the file cannot be read: {error}"
    notes = [note] if note else []
    if row is None and fragment.files:
        notes.append(f"the row was one of {fragment}")
    elif row is None:
        notes.append(f"the row was one of {fragment.start} to {fragment.stop - 1}")
    return Step(
        stage=book.label(SOURCE),
        kind=SOURCE,
        partition=book.partition,
        keys={column: id},
        url=span.url,
        row=row,
        version=recorded.version if recorded else "",
        size=recorded.size if recorded else None,
        notes=tuple(notes),
    )


def _file_with(book: Book, manifest: Manifest, fragment: FragmentRecord, id: Any) -> FileSpan:
    """The file of a fragment that has a row; the first if none is found."""
    spans = fragment.spans
    if len(spans) == 1:
        return spans[0]
    try:
        hit = book.find_in_source(manifest, spans, id)
    except (FileNotFoundError, StoreError):
        hit = None
    return hit[0] if hit else spans[0]


def _rows(span: FileSpan, fragment: FragmentRecord) -> str:
    return str(fragment) if fragment.files else f"rows {span.start} to {span.stop}"


_MOST_MANIFESTS = 50


@dataclass(frozen=True)
class Beyond:
    """A row of another pipeline: its manifest, part and place."""

    book: Book
    name: str
    manifest: Manifest
    index: int
    found: Found


def beyond(book: Book, step: Step) -> Beyond | None:
    """The row of another pipeline's stage that a row of the source is; None if it is none.

    Raises:
        StoreError: If a manifest cannot be read.
    """
    place = _stage_of(book, step.url)
    if place is None or step.row is None:
        return None
    pipeline, stage, folder, file = place
    manifests = book.store.root.child(pipeline, stage, "manifests", folder)
    named = sorted((n for n in manifests.names() if ManifestName.parse(n)), reverse=True)
    for name in named[:_MOST_MANIFESTS]:
        manifest = book.store.opened(manifests, name)
        index = next((i for i, part in enumerate(manifest.parts) if part.name == file), None)
        if index is not None and manifest.keys and manifest.reads:
            other = Book(book.store, pipeline, manifest.partition)
            part = RowFile(book.store.parts(pipeline, stage, manifest.partition), file)
            try:
                found = row_at(part, manifest.keys, step.row)
            except (FileNotFoundError, StoreError):
                return None
            return Beyond(other, name, manifest, index, found)
    return None


def _stage_of(book: Book, url: str) -> tuple[str, str, str, str] | None:
    """Pipeline, stage, folder of the partition and file name of a part in the store."""
    root = book.store.root
    if protocol_of(url) != protocol_of(root.url):
        return None
    path, above = Location(url, root.storage_options).path, f"{root.path}/"
    names = path[len(above) :].split("/") if path.startswith(above) else []
    if len(names) != 5 or names[2] != "parts" or names[0].startswith("~"):
        return None
    return names[0], names[1], names[3], names[4]


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
    walk = _ForwardWalk(book, manifest.fragments[index], index)
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
    walk = _ForwardWalk(book, newest.fragments[index], index)
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


class _ForwardWalk:
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
