"""Traces: from a row back to its source, and forward to every row made from it.

A backward trace follows the manifests that each stage was made from. A forward trace follows the
manifests in force. If a pipeline's source is the rows of another pipeline, the backward trace
continues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import StoreError, TraceError
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.storage.filesystem import Location, protocol_of
from vane_dagster.storage.manifest import FileSpan, FragmentRecord, Manifest, ManifestName
from vane_dagster.storage.row_search import Found, RowFile, find, row_at
from vane_dagster.tracing.manifest_index import (
    ManifestIndex,
    aligned,
    file_of,
    fragment_index,
)
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
class _WantedRows:
    """Rows to find in a stage: the part's index, and the wanted values by key position."""

    index: int | None
    by: dict[int, dict[Any, Sequence[Any] | None]] = field(default_factory=dict)


def trace_back(manifest_index: ManifestIndex, stage: str, id: Any) -> Trace:
    """Trace a row back, across pipelines that read the rows of other pipelines."""
    if stage == SOURCE:
        raise TraceError(
            f"{manifest_index.label(stage)!r} is where every trace ends; ask for a stage's row, or "
            "trace forward from here"
        )
    name, manifest = manifest_index.require(stage)
    key = manifest_index.converted(manifest, 0, stage, id)
    try:
        located = manifest_index.locate(manifest, key)
    except FileNotFoundError as error:
        raise StoreError(
            f"{manifest_index.label(stage)!r}: a part of its manifest {name} is gone: {error}. "
            "Materialize it again"
        ) from error
    if located is None:
        raise not_found(manifest_index, manifest, key)
    walk = _BackwardWalk(manifest_index)
    walk.visit((stage, name), located[0], [located[1]])
    shown = tuple(reversed(walk.steps))
    return Trace(
        manifest_index.label(stage), manifest_index.partition, key, False, shown, walk.omitted
    )


class _BackwardWalk:
    """Visits stages upstream, each after all stages that read it."""

    def __init__(self, manifest_index: ManifestIndex) -> None:
        self._manifest_index = manifest_index
        self.steps: list[Step] = []
        self.omitted: dict[str, int] = {}
        self._asked: dict[_Node, _WantedRows] = {}
        self._source: dict[tuple[str, int, Any], tuple[Manifest, int, Any]] = {}

    def visit(self, node: _Node, index: int, found: Sequence[Found]) -> None:
        """Start at known rows."""
        for number, current in enumerate(self._order(node)):
            manifest = self._manifest_index.open(*current)
            if number == 0:
                assert manifest is not None
                self._add([self._step(current, manifest, index, row) for row in found])
                self._ask(manifest, index, [row.keys for row in found])
            elif current in self._asked:
                self._look(current, manifest, self._asked[current])
        sources = [source_step(self._manifest_index, *asked) for asked in self._source.values()]
        self._add(sources)
        for step in sources:
            self._go_on(step)

    def _go_on(self, step: Step) -> None:
        """Continue in another pipeline if the row of the source is one of its rows."""
        if (other := upstream_pipeline_row(self._manifest_index, step)) is None:
            return
        walk = _BackwardWalk(other.manifest_index)
        walk.visit((other.manifest.stage, other.name), other.index, [other.found])
        self.steps += walk.steps
        self.omitted |= walk.omitted

    def _order(self, first: _Node) -> list[_Node]:
        """Return a stage and its upstream stages, each after all stages that read it."""
        done: dict[_Node, None] = {}

        def go(node: _Node) -> None:
            if node in done:
                return
            manifest = self._manifest_index.open(*node)
            for upstream in manifest.upstream.items() if manifest else ():
                go(upstream)
            done[node] = None

        go(first)
        return list(reversed(done))

    def _ask(self, manifest: Manifest, index: int, rows: Sequence[Sequence[Any]]) -> None:
        """Request the rows of upstream stages that some rows were made from."""
        fragment = manifest.fragments[index]
        for upstream in manifest.reads:
            if upstream == SOURCE:
                self._ask_source(manifest, index, rows)
                continue
            node = (upstream, manifest.upstream[upstream])
            above = self._manifest_index.open(*node)
            where = fragment_index(above, fragment, index) if above else None
            asked = self._asked.setdefault(node, _WantedRows(where))
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

    def _look(self, node: _Node, manifest: Manifest | None, asked: _WantedRows) -> None:
        """Find the rows that downstream stages requested, and request their upstream rows."""
        if manifest is None or asked.index is None:
            note = (
                f"its manifest {node[1]} was collected, so this step is not known any more"
                if manifest is None
                else f"its manifest {node[1]} has other fragments than what was made from it"
            )
            self._add(
                [
                    Step(
                        self._manifest_index.label(node[0]),
                        "",
                        self._manifest_index.partition,
                        notes=(note,),
                    )
                ]
            )
            return
        found: dict[int, Found] = {}
        known: list[Sequence[Any]] = []
        lost = ""
        for position, wanted in asked.by.items():
            try:
                for file in self._manifest_index.rows_of(manifest, asked.index):
                    hits = find(file, manifest.keys, position, wanted, unique=position == 0)
                    found.update({hit.row: hit for hit in hits})
            except (FileNotFoundError, StoreError) as error:
                lost = f"the part is gone or cannot be read: {error}"
                known += [keys for keys in wanted.values() if keys is not None]
        rows = [found[row] for row in sorted(found)]
        steps = [self._step(node, manifest, asked.index, row) for row in rows[:SHOWN]]
        if lost:
            steps += [
                stage_step(self._manifest_index, manifest, node[1], asked.index, None, keys, [lost])
                for keys in known[:SHOWN] or [()]
            ]
        elif not rows:
            note = "no row here: it was joined with none"
            steps = [
                stage_step(self._manifest_index, manifest, node[1], asked.index, None, (), [note])
            ]
        self._add(steps)
        if len(rows) > SHOWN:
            label = self._manifest_index.label(node[0])
            self.omitted[label] = self.omitted.get(label, 0) + len(rows) - SHOWN
        self._ask(manifest, asked.index, [*(row.keys for row in rows), *known])

    def _step(self, node: _Node, manifest: Manifest, index: int, found: Found) -> Step:
        return stage_step(self._manifest_index, manifest, node[1], index, found)

    def _add(self, steps: Sequence[Step]) -> None:
        """Append steps in reverse; reversing all steps then restores the order of their rows."""
        self.steps += reversed(steps)


def stage_step(
    manifest_index: ManifestIndex,
    manifest: Manifest,
    name: str,
    index: int,
    found: Found | None,
    keys: Sequence[Any] = (),
    notes: Sequence[str] = (),
) -> Step:
    """Return the step of a row in a part."""
    made = manifest.parts[index].made
    keys = found.keys if found else keys
    published = manifest_index.published(manifest, index, found) if found else None
    if found and isinstance(published, tuple):
        found = Found(published[0], published[1], found.keys)
    return Step(
        stage=manifest_index.label(manifest.stage),
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
        copied_from=manifest_index.origin(manifest, index, keys[manifest.input_key])
        if keys
        else None,
        published=_urls(published),
        notes=tuple(notes),
    )


def _urls(published: tuple[RowFile, int] | list[str] | None) -> tuple[str, ...]:
    if isinstance(published, tuple):
        return (published[0].url,)
    return tuple(published or ())


def source_step(manifest_index: ManifestIndex, manifest: Manifest, index: int, id: Any) -> Step:
    """Return the step of a row in its source file, as a manifest recorded the file.

    A note describes later changes of the file.
    """
    fragment = manifest.fragments[index]
    column = manifest_index.source_id(manifest)
    hit = manifest_index.position_in_source(manifest, index, id)
    span = hit[0] if hit else _file_with(manifest_index, manifest, fragment, id)
    recorded = file_of(manifest, span.url)
    note = manifest_index.changed(manifest, recorded) if recorded else None
    if hit is None and note is None:
        try:
            hit = manifest_index.find_in_source(manifest, [span], id)
            note = None if hit else f"no such row in {_rows(span, fragment)}"
        except (FileNotFoundError, StoreError) as error:
            note = f"the file cannot be read: {error}"
    row = hit[1] if hit else None
    notes = [note] if note else []
    if row is None and fragment.files:
        notes.append(f"the row was one of {fragment}")
    elif row is None:
        notes.append(f"the row was one of {fragment.start} to {fragment.stop - 1}")
    return Step(
        stage=manifest_index.label(SOURCE),
        kind=SOURCE,
        partition=manifest_index.partition,
        keys={column: id},
        url=span.url,
        row=row,
        version=recorded.version if recorded else "",
        size=recorded.size if recorded else None,
        notes=tuple(notes),
    )


def _file_with(
    manifest_index: ManifestIndex, manifest: Manifest, fragment: FragmentRecord, id: Any
) -> FileSpan:
    """Return the span of a fragment that contains a row; the first span if none does."""
    spans = fragment.spans
    if len(spans) == 1:
        return spans[0]
    try:
        hit = manifest_index.find_in_source(manifest, spans, id)
    except (FileNotFoundError, StoreError):
        hit = None
    return hit[0] if hit else spans[0]


def _rows(span: FileSpan, fragment: FragmentRecord) -> str:
    return str(fragment) if fragment.files else f"rows {span.start} to {span.stop}"


_MAX_MANIFESTS = 50


@dataclass(frozen=True)
class UpstreamPipelineRow:
    """A row of another pipeline: its manifest, part and position."""

    manifest_index: ManifestIndex
    name: str
    manifest: Manifest
    index: int
    found: Found


def upstream_pipeline_row(manifest_index: ManifestIndex, step: Step) -> UpstreamPipelineRow | None:
    """The row of another pipeline's stage that a row of the source is; None if it is none."""
    place = _stage_of(manifest_index, step.url)
    if place is None or step.row is None:
        return None
    pipeline, stage, folder, file = place
    manifests = manifest_index.store.root.child(pipeline, stage, "manifests", folder)
    named = sorted((n for n in manifests.names() if ManifestName.parse(n)), reverse=True)
    for name in named[:_MAX_MANIFESTS]:
        manifest = manifest_index.store.opened(manifests, name)
        index = next((i for i, part in enumerate(manifest.parts) if part.name == file), None)
        if index is not None and manifest.keys and manifest.reads:
            other = ManifestIndex(manifest_index.store, pipeline, manifest.partition)
            part = RowFile(manifest_index.store.parts(pipeline, stage, manifest.partition), file)
            try:
                found = row_at(part, manifest.keys, step.row)
            except (FileNotFoundError, StoreError):
                return None
            return UpstreamPipelineRow(other, name, manifest, index, found)
    return None


def _stage_of(manifest_index: ManifestIndex, url: str) -> tuple[str, str, str, str] | None:
    """Return the pipeline, stage, partition folder and file name of a part in the store."""
    root = manifest_index.store.root
    if protocol_of(url) != protocol_of(root.url):
        return None
    path, above = Location(url, root.storage_options).path, f"{root.path}/"
    names = path[len(above) :].split("/") if path.startswith(above) else []
    if len(names) != 5 or names[2] != "parts" or names[0].startswith("~"):
        return None
    return names[0], names[1], names[3], names[4]


@dataclass(frozen=True)
class _StageRows:
    """The rows that a stage has of a forward trace.

    Attributes:
        keys: Number of keys per row.
        rows: The rows, by their keys.
        passed: Keys that the rows would have had. They are searched for in downstream stages that
            were made from another materialization of this stage.
    """

    keys: int
    rows: Sequence[Sequence[Any]]
    passed: Sequence[Sequence[Any]] = ()


def trace_forward(manifest_index: ManifestIndex, stage: str, id: Any) -> Trace:
    """Trace a row of a stage, or of the source, forward."""
    if stage == SOURCE:
        return _from_source(manifest_index, id)
    name, manifest = manifest_index.require(stage)
    key = manifest_index.converted(manifest, 0, stage, id)
    located = manifest_index.locate(manifest, key)
    if located is None:
        raise not_found(manifest_index, manifest, key)
    index, found = located
    walk = _ForwardWalk(manifest_index, manifest.fragments[index], index)
    walk.steps.append(stage_step(manifest_index, manifest, name, index, found))
    walk.reached[stage] = _StageRows(len(manifest.keys), [found.keys])
    return walk.trace(stage, key)


def _from_source(manifest_index: ManifestIndex, id: Any) -> Trace:
    heads = []
    for stage in manifest_index.stages:
        found = manifest_index.in_force(stage)
        if found and found[1].keys and SOURCE in found[1].reads:
            heads.append(found[1])
    if not heads:
        shapes = ((stage, manifest_index.shape(stage)) for stage in manifest_index.stages)
        manifest_index.require(
            next((s for s, shape in shapes if shape and SOURCE in shape.reads), SOURCE)
        )
    heads.sort(key=lambda head: -head.committed_at)
    newest = heads[0]
    key = manifest_index.converted(newest, -1, SOURCE, id)
    index = next(
        (
            i
            for head in heads
            if (i := _index_by_part(manifest_index, newest, head, key)) is not None
        ),
        None,
    )
    if index is None:
        try:
            hit = search_source(manifest_index, newest, key)
        except (FileNotFoundError, StoreError) as error:
            raise TraceError(
                f"{manifest_index.label(SOURCE)!r} has no row with id {key!r} that a stage has "
                f"kept, and its files cannot be searched: {error}"
            ) from error
        recorded = hit and file_of(newest, hit.url)
        if hit is None or (recorded and manifest_index.changed(newest, recorded)):
            return _changed(manifest_index, newest, key)
        index = hit.index
    walk = _ForwardWalk(manifest_index, newest.fragments[index], index)
    walk.steps.append(source_step(manifest_index, newest, index, key))
    walk.reached[SOURCE] = _StageRows(1, [(key,)])
    return walk.trace(SOURCE, key)


def _index_by_part(
    manifest_index: ManifestIndex, newest: Manifest, head: Manifest, key: Any
) -> int | None:
    """Return the index of the row's fragment, if a stage that reads the source kept the row."""
    if len(head.keys) != 1:
        return None
    try:
        located = manifest_index.locate(head, key)
    except (FileNotFoundError, StoreError):
        return None
    return (
        None if located is None else fragment_index(newest, head.fragments[located[0]], located[0])
    )


def _changed(manifest_index: ManifestIndex, manifest: Manifest, key: Any) -> Trace:
    """Return the trace of a row that was added to a source file after the file was read."""
    hit = search_changed(manifest_index, manifest, key)
    where = "" if manifest_index.partition is None else f", partition {manifest_index.partition!r}"
    if hit is None:
        raise TraceError(
            f"{manifest_index.label(SOURCE)!r}{where} has no row with id {key!r} in "
            f"{looked_at(manifest)}, which the stages were made from"
        )
    note = "the file was changed since it was read"
    step = Step(
        manifest_index.label(SOURCE), SOURCE, manifest_index.partition,
        {manifest_index.source_id(manifest): key},
        hit[0].url, hit[1], notes=(note,),
    )  # fmt: skip
    reason = "made from an older version of the source; materialize it again"
    missing = {manifest_index.label(stage): reason for stage in manifest_index.stages}
    return Trace(
        manifest_index.label(SOURCE), manifest_index.partition, key, True, (step,), {}, missing
    )


class _ForwardWalk:
    """Visits stages downstream, each after all its inputs."""

    def __init__(self, manifest_index: ManifestIndex, fragment: FragmentRecord, index: int) -> None:
        self._manifest_index, self._fragment, self._index = manifest_index, fragment, index
        self.steps: list[Step] = []
        self.omitted: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        self.reached: dict[str, _StageRows] = {}

    def trace(self, stage: str, id: Any) -> Trace:
        """Visit all downstream stages and return the trace."""
        for below in self._below(stage):
            self._look(below)
        return Trace(
            self._manifest_index.label(stage), self._manifest_index.partition, id, True,
            tuple(self.steps),
            self.omitted, self.missing,
        )  # fmt: skip

    def _below(self, first: str) -> list[str]:
        """Return the direct and indirect downstream stages of a stage, each after its inputs."""
        shapes = {stage: self._manifest_index.shape(stage) for stage in self._manifest_index.stages}
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
        label = self._manifest_index.label(stage)
        in_force = self._manifest_index.in_force(stage)
        shape = in_force[1] if in_force else self._manifest_index.shape(stage)
        assert shape is not None, "a stage below has a manifest that says what it reads"
        above = {u: self.reached[u] for u in shape.reads if u in self.reached}
        passed = self._wanted(shape, above, set(above))
        known = [keys for wanted in passed.values() for keys in wanted.values() if keys is not None]
        self.reached[stage] = _StageRows(len(shape.keys), (), known)
        if in_force is None:
            self.missing[label] = (
                "not materialized yet"
                if self._manifest_index.partition is None
                else f"not materialized yet in partition {self._manifest_index.partition}"
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
            f"made from an older {self._manifest_index.label(u)}; materialize it again"
            for u in sorted(stale)
        ]
        self.reached[stage] = _StageRows(len(manifest.keys), [row.keys for row in rows])
        self.steps += [
            stage_step(self._manifest_index, manifest, name, index, row, (), notes)
            for row in rows[:SHOWN]
        ]
        if len(rows) > SHOWN:
            self.omitted[label] = len(rows) - SHOWN

    def _is_of(self, manifest: Manifest, upstream: str) -> bool:
        """Whether a manifest was made from the manifest in force of an upstream stage."""
        in_force = self._manifest_index.in_force(upstream)
        return in_force is not None and manifest.upstream.get(upstream) == in_force[0]

    def _wanted(
        self, manifest: Manifest, above: dict[str, _StageRows], guessed: set[str]
    ) -> dict[int, dict[Any, Sequence[Any] | None]]:
        """Return the values to find in a stage by key position, partly guessed for `guessed`."""
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
            for file in self._manifest_index.rows_of(manifest, index):
                for hit in find(file, manifest.keys, position, values, unique=position == 0):
                    found[hit.file.url, hit.row] = hit
        return [found[place] for place in sorted(found)]

    def _reason(
        self, manifest: Manifest, index: int, above: dict[str, _StageRows], stale: set[str]
    ) -> str:
        if stale:
            older = ", ".join(self._manifest_index.label(u) for u in sorted(stale))
            return f"nothing; it was made from an older {older}"
        if lacking := [
            self._manifest_index.label(u) for u, reached in above.items() if not reached.rows
        ]:
            return f"nothing, as {', '.join(lacking)} has nothing of it"
        ids = {keys[0] for reached in above.values() for keys in reached.rows}
        return leaving(self._manifest_index, manifest, index, ids)
