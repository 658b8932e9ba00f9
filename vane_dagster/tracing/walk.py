"""Traces: from a row back to its source, and forward to every row made from it.

A backward trace follows the manifests that each stage was made from. A forward trace follows the
manifests in force. If a pipeline's source is the rows of another pipeline, both continue from one
to the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vane_dagster._texts import in_partition
from vane_dagster.errors import DamagedPartError, StoreError, TraceError, names
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.sources.stored import ASSET, MAPPED_BY
from vane_dagster.storage.filesystem import StoragePath, protocol_of
from vane_dagster.storage.manifest import FragmentRecord, Manifest
from vane_dagster.storage.reader import find
from vane_dagster.storage.row_search import Found, row_at
from vane_dagster.storage.store import Store
from vane_dagster.tracing.manifest_index import (
    ManifestIndex,
    Wanted,
    aligned,
    file_of,
    fragment_index,
    pipelines,
)
from vane_dagster.tracing.missing import (
    leaving,
    looked_at,
    not_found,
    search_source,
)
from vane_dagster.tracing.steps import SHOWN, Step, Trace

_Node = tuple[str, str]
_T = TypeVar("_T", bound=Hashable)


@dataclass
class _WantedRows:
    """Rows to find in a stage: the part's index, and the wanted values by key position."""

    index: int | None
    by: Wanted = field(default_factory=dict)


def _known(wanted: Wanted) -> list[Sequence[Any]]:
    """Return the keys of wanted rows that are known before the rows are found."""
    return [keys for values in wanted.values() for keys in values.values() if keys is not None]


def _ordered(first: _T, next_of: Callable[[_T], Iterable[_T]]) -> list[_T]:
    """Return a stage and all that follow it, each after those that it follows."""
    seen, done = {first}, []

    def visit(node: _T) -> None:
        for each in next_of(node):
            if each not in seen:
                seen.add(each)
                visit(each)
        done.append(node)

    visit(first)
    return done[::-1]


def _located(
    manifest_index: ManifestIndex, stage: str, id: Any
) -> tuple[str, Manifest, Any, int, Found]:
    """Find a row in a stage's manifest in force, by the text of its id."""
    name, manifest = manifest_index.require(stage)
    key = manifest_index.converted(manifest, 0, stage, id)
    try:
        located = manifest_index.locate(manifest, key)
    except DamagedPartError as error:
        raise StoreError(
            f"{manifest_index.label(stage)!r}, manifest {name}: {error}. Materialize it again with "
            "force"
        ) from error
    if located is None:
        raise not_found(manifest_index, manifest, key)
    return name, manifest, key, *located


def trace_back(manifest_index: ManifestIndex, stage: str, id: Any) -> Trace:
    """Trace a row back, across pipelines that read the rows of other pipelines."""
    if stage == SOURCE:
        raise TraceError(
            f"{manifest_index.label(stage)!r} is where every trace ends; ask for a stage's row, or "
            "trace forward from here"
        )
    name, _, key, index, start = _located(manifest_index, stage, id)
    walk = _BackwardWalk(manifest_index)
    walk.visit((stage, name), index, start)
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

    def visit(self, node: _Node, index: int, row: Found) -> None:
        """Start at a known row."""
        for current in _ordered(node, self._upstream):
            manifest = self._manifest_index.open(*current)
            if current == node:
                assert manifest is not None
                self._add([stage_step(self._manifest_index, manifest, node[1], index, row)])
                self._ask(manifest, index, [row.keys])
            elif current in self._asked:
                self._look(current, manifest, self._asked[current])
        sources = [source_step(self._manifest_index, *asked) for asked in self._source.values()]
        self._add(sources)
        for step in sources:
            self._go_on(step)

    def _go_on(self, step: Step) -> None:
        """Continue in another pipeline if the row of the source is one of its rows."""
        store = self._manifest_index.store
        place = _stage_of(store, step.url)
        if place is None or step.row is None:
            return
        pipeline, stage, folder, file = place
        made = [str(name) for of, name in store.history(pipeline, stage) if of == folder]
        for name in reversed(made):
            manifest = store.opened(pipeline, stage, folder, name)
            index = next((i for i, part in enumerate(manifest.parts) if part.name == file), None)
            if index is None:
                continue
            try:
                row = row_at(store.parts_of(manifest), file, manifest.keys, step.row)
            except (FileNotFoundError, StoreError):
                return
            walk = _BackwardWalk(ManifestIndex(store, pipeline, manifest.partition))
            walk.visit((stage, name), index, row)
            self.steps += walk.steps
            self.omitted |= walk.omitted
            return

    def _upstream(self, node: _Node) -> Iterable[_Node]:
        manifest = self._manifest_index.open(*node)
        return manifest.upstream.items() if manifest else ()

    def _ask(self, manifest: Manifest, index: int, rows: Sequence[Sequence[Any]]) -> None:
        """Request the rows of upstream stages that some rows were made from."""
        fragment = manifest.fragments[index]
        for upstream in manifest.reads:
            if upstream == SOURCE:
                self._ask_source(manifest, index, rows)
                continue
            node = (upstream, manifest.upstream[upstream])
            above = self._manifest_index.open(*node)
            where = fragment_index(above, fragment) if above else None
            asked = self._asked.setdefault(node, _WantedRows(where))
            if above is None or where is None:
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
        label = self._manifest_index.label(node[0])
        if manifest is None or asked.index is None:
            note = (
                f"its manifest {node[1]} was collected, so this step is unknown"
                if manifest is None
                else f"its manifest {node[1]} has different fragments than the rows made from it"
            )
            self._add([Step(label, "", self._manifest_index.partition, notes=(note,))])
            return
        rows: list[Found] = []
        known: list[Sequence[Any]] = []
        note = "no row: the join had no matching row here"
        try:
            rows = self._manifest_index.find(manifest, asked.index, asked.by)
        except (FileNotFoundError, StoreError) as error:
            note = f"the part is gone or cannot be read: {error}"
            known = _known(asked.by)
        place = (self._manifest_index, manifest, node[1], asked.index)
        if rows:
            self._add([stage_step(*place, row) for row in rows[:SHOWN]])
        else:
            self._add([stage_step(*place, None, keys, [note]) for keys in known[:SHOWN] or [()]])
        if len(rows) > SHOWN:
            self.omitted[label] = self.omitted.get(label, 0) + len(rows) - SHOWN
        self._ask(manifest, asked.index, [row.keys for row in rows] or known)

    def _add(self, steps: Sequence[Step]) -> None:
        """Append steps in reverse; reversing all steps then restores the order of their rows."""
        self.steps += reversed(steps)


def stage_step(
    manifest_index: ManifestIndex,
    manifest: Manifest,
    name: str,
    index: int,
    match: Found | None,
    keys: Sequence[Any] = (),
    notes: Sequence[str] = (),
) -> Step:
    """Return the step of a row in a part."""
    made = manifest.parts[index].made
    keys = match.keys if match else keys
    copied = manifest_index.origin(manifest, index, keys[manifest.input_key]) if keys else None
    code = (made.definition if made else "") or manifest.definition
    return Step(
        stage=manifest_index.label(manifest.stage),
        kind=manifest.kind,
        partition=manifest.partition,
        keys=dict(zip(manifest.keys, keys)),
        url=match.url if match else "",
        row=match.row if match else None,
        reads=tuple(manifest.reads),
        manifest=name,
        run_id=made.run_id if made else "",
        committed_by=manifest.run_id,
        code_version=code,
        model=manifest.model.get("name", ""),
        pool=manifest.model.get("pool", ""),
        workers=made.workers if made else (),
        at=made.at if made else None,
        seconds=made.seconds if made else None,
        copied_from=copied,
        published=manifest_index.published(manifest, index),
        notes=(*notes, *manifest_index.adopted(manifest)),
        values=manifest_index.values(manifest, code, match) if match else {},
    )


def source_step(manifest_index: ManifestIndex, manifest: Manifest, index: int, id: Any) -> Step:
    """Return the step of a row in its source file, as a manifest recorded the file.

    A note describes later changes of the file.
    """
    fragment = manifest.fragments[index]
    try:
        hit = manifest_index.find_in_source(manifest, fragment.spans, id)
        note = "the source has no such row"
    except (FileNotFoundError, StoreError) as error:
        hit, note = None, f"the file cannot be read: {error}"
    span = hit[0] if hit else fragment.spans[0]
    recorded = file_of(manifest, span.url)
    if changed := manifest_index.changed(manifest, recorded) if recorded else None:
        hit, note = None, changed
    notes = () if hit else (note, f"the row was one of {fragment}")
    return Step(
        stage=manifest_index.label(SOURCE),
        kind=SOURCE,
        partition=manifest_index.partition,
        keys={manifest_index.source_id(manifest): id},
        url=span.url,
        row=hit[1] if hit else None,
        version=recorded.version if recorded else "",
        size=recorded.size if recorded else None,
        notes=notes,
        values=manifest_index.source_values(manifest, *hit) if hit else {},
    )


def _stage_of(store: Store, url: str) -> tuple[str, str, str, str] | None:
    """Return the pipeline, stage, partition folder and file name of a part in the store."""
    for root in (each.root for each in store.layers):
        if protocol_of(url) != protocol_of(root.url):
            continue
        path, above = StoragePath(url, root.storage_options).path, f"{root.path}/"
        names = path[len(above) :].split("/") if path.startswith(above) else []
        if len(names) == 5 and names[2] == "parts" and not names[0].startswith("~"):
            return names[0], names[1], names[3], names[4]
    return None


@dataclass(frozen=True)
class _StageRows:
    """The rows that a stage has of a forward trace.

    Attributes:
        depth: Number of keys per row.
        rows: The keys of each row. If the stage has none, those that it would have had: a
            downstream stage made from another materialization of the stage may have them.
        is_found: Whether the stage has the rows.
    """

    depth: int
    rows: Sequence[Sequence[Any]]
    is_found: bool = True

    def lacks(self, ids: set[Any], depth: int) -> bool:
        """Whether a stage of as many keys lacks rows that one of its readers could have had."""
        known = {keys[0] for keys in self.rows} if self.depth == depth else ids
        return not self.is_found or ids.isdisjoint(known)


def trace_forward(manifest_index: ManifestIndex, stage: str, id: Any) -> Trace:
    """Trace a row of a stage, or of the source, forward."""
    if stage == SOURCE:
        return _from_source(manifest_index, id)
    name, manifest, key, index, start = _located(manifest_index, stage, id)
    walk = _ForwardWalk(manifest_index, manifest.fragments[index])
    walk.steps.append(stage_step(manifest_index, manifest, name, index, start))
    walk.reached[stage] = _StageRows(len(manifest.keys), [start.keys])
    return walk.trace(stage, key)


def _from_source(manifest_index: ManifestIndex, id: Any) -> Trace:
    in_force = filter(None, map(manifest_index.in_force, manifest_index.stages))
    heads = [head for _, head in in_force if SOURCE in head.reads]
    if not heads:
        shapes = ((stage, manifest_index.shape(stage)) for stage in manifest_index.stages)
        manifest_index.require(
            next((s for s, shape in shapes if shape and SOURCE in shape.reads), SOURCE)
        )
    heads.sort(key=lambda head: -head.committed_at)
    newest = heads[0]
    key = manifest_index.converted(newest, -1, SOURCE, id)
    indexes = (_index_by_part(manifest_index, newest, head, key) for head in heads)
    index = next((i for i in indexes if i is not None), None)
    if index is None:
        try:
            hit = search_source(manifest_index, newest, key)
        except (FileNotFoundError, StoreError) as error:
            raise TraceError(
                f"no stage kept a row with id {key!r} from {manifest_index.label(SOURCE)!r}, and "
                f"the source files cannot be searched: {error}"
            ) from error
        recorded = hit and file_of(newest, hit[1].url)
        if hit is None or (recorded and manifest_index.changed(newest, recorded)):
            raise TraceError(
                f"{manifest_index.label(SOURCE)!r}{in_partition(manifest_index.partition)} has no "
                f"row with id {key!r} in the version of {looked_at(newest)} that the stages read. "
                "If the files changed since, materialize the stages again"
            )
        index = hit[0]
    walk = _ForwardWalk(manifest_index, newest.fragments[index])
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
    return located and fragment_index(newest, head.fragments[located[0]])


class _ForwardWalk:
    """Visits stages downstream, each after all its inputs."""

    def __init__(self, manifest_index: ManifestIndex, fragment: FragmentRecord) -> None:
        self._manifest_index, self._fragment = manifest_index, fragment
        self.steps: list[Step] = []
        self.omitted: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        self.reached: dict[str, _StageRows] = {}

    def trace(self, stage: str, id: Any) -> Trace:
        """Visit all downstream stages and return the trace."""
        for below in self._below(stage):
            self._look(below)
        for pipeline in pipelines(self._manifest_index.store):
            self._go_on(pipeline)
        return Trace(
            self._manifest_index.label(stage), self._manifest_index.partition, id, True,
            tuple(self.steps),
            self.omitted, self.missing,
        )  # fmt: skip

    def _go_on(self, pipeline: str) -> None:
        """Continue in another pipeline if its source is a stage with rows of the trace."""
        store, partition = self._manifest_index.store, self._manifest_index.partition
        source = (store.source(pipeline) or "").partition(f": {ASSET} ")[2]
        asset, _, mapping = source.partition(MAPPED_BY)
        rows, stages = [each for each in self.steps if each.stage == asset], store.stages(pipeline)
        if not rows or not stages:
            return
        partitions: Iterable[str | None] = (partition, None)
        if mapping:
            partitions = (key for stage in stages for key in find(store, (pipeline, stage), None))
        walks, reason = [], f"not materialized yet in partition {partition}"
        for key in dict.fromkeys(partitions):
            other = ManifestIndex(store, pipeline, key)
            in_force = [head for _, head in filter(None, map(other.in_force, other.stages))]
            heads = [head for head in in_force if SOURCE in head.reads]
            for head in sorted(heads, key=lambda head: -head.committed_at)[:1]:
                reason = f"made from another version of {rows[0].stage}; materialize it again"
                walks += [*_walks_on(other, head, rows)]
        if not walks:
            self.missing[f"{pipeline}/{SOURCE}"] = reason
        for found in walks:
            self.steps += found.steps
            self.omitted |= found.omitted
            self.missing |= found.missing

    def _below(self, first: str) -> list[str]:
        """Return the direct and indirect downstream stages of a stage, each after its inputs."""
        readers: dict[str, list[str]] = {}
        for stage in reversed(self._manifest_index.stages):
            shape = self._manifest_index.shape(stage)
            for upstream in shape.reads if shape else ():
                readers.setdefault(upstream, []).append(stage)
        return _ordered(first, lambda stage: readers.get(stage, ()))[1:]

    def _look(self, stage: str) -> None:
        label = self._manifest_index.label(stage)
        in_force = self._manifest_index.in_force(stage)
        shape = in_force[1] if in_force else self._manifest_index.shape(stage)
        assert shape is not None, "a stage below has a manifest that says what it reads"
        above = {u: self.reached[u] for u in shape.reads if u in self.reached}
        wanted: Wanted = {}
        for reached in above.values():
            position, values = aligned(reached.rows, reached.depth, len(shape.keys))
            wanted.setdefault(position, {}).update(values)
        self.reached[stage] = _StageRows(len(shape.keys), _known(wanted), is_found=False)
        if in_force is None:
            partition = self._manifest_index.partition
            self.missing[label] = f"not materialized yet in partition {partition}"
            return
        name, manifest = in_force
        index = fragment_index(manifest, self._fragment)
        if index is None:
            self.missing[label] = "made from another version of the source; materialize it again"
            return
        stale = {u for u in above if u != SOURCE and not self._is_of(manifest, u)}
        try:
            rows = self._manifest_index.find(manifest, index, wanted)
        except (FileNotFoundError, StoreError) as error:
            self.missing[label] = f"its part is gone or cannot be read: {error}"
            return
        if not rows:
            ids = {keys[0] for reached in above.values() for keys in reached.rows}
            self.missing[label] = self._reason(manifest, index, above, stale, ids)
            return
        notes = [
            f"made from an older {self._manifest_index.label(u)}; materialize it again"
            for u in sorted(stale)
        ]
        self.reached[stage] = _StageRows(len(manifest.keys), [row.keys for row in rows])
        reasons: dict[str, list[Any]] = {}
        for id in (absent := self._absent(stage, above))[:SHOWN]:
            reason = self._reason(manifest, index, above, stale, {id})
            reasons.setdefault(reason, []).append(id)
        if absent:
            texts = [f"{names(ids)}: {reason}" for reason, ids in reasons.items()]
            texts += [f"and {more:,} more"] if (more := len(absent) - SHOWN) > 0 else []
            self.missing[label] = "; ".join(texts)
        self.steps += [
            stage_step(self._manifest_index, manifest, name, index, row, (), notes)
            for row in rows[:SHOWN]
        ]
        if len(rows) > SHOWN:
            self.omitted[label] = len(rows) - SHOWN

    def _absent(self, stage: str, above: dict[str, _StageRows]) -> list[Any]:
        """Return the ids of upstream rows that a stage made no row from."""
        made, ids = self.reached[stage], dict[Any, None]()
        for reached in above.values():
            depth = min(reached.depth, made.depth)
            kept = {tuple(keys[-depth:]) for keys in made.rows}
            rows = reached.rows if reached.is_found else ()
            ids |= dict.fromkeys(keys[0] for keys in rows if tuple(keys[-depth:]) not in kept)
        return list(ids)

    def _is_of(self, manifest: Manifest, upstream: str) -> bool:
        """Whether a manifest was made from the manifest in force of an upstream stage."""
        in_force = self._manifest_index.in_force(upstream)
        return in_force is not None and manifest.upstream.get(upstream) == in_force[0]

    def _reason(
        self,
        manifest: Manifest,
        index: int,
        above: dict[str, _StageRows],
        stale: set[str],
        ids: set[Any],
    ) -> str:
        if stale:
            older = ", ".join(self._manifest_index.label(u) for u in sorted(stale))
            return f"no row; it was made from an older {older}"
        depth = len(manifest.keys)
        if lacking := [
            self._manifest_index.label(u) for u, rows in above.items() if rows.lacks(ids, depth)
        ]:
            return f"no row, because {', '.join(lacking)} has none"
        return leaving(self._manifest_index, manifest, index, ids)


def _walks_on(
    manifest_index: ManifestIndex, manifest: Manifest, rows: Sequence[Step]
) -> Iterable[Trace]:
    """Trace rows of a stage forward in a pipeline that reads the stage's parts."""
    place_of = functools.partial(_stage_of, manifest_index.store)
    numbers: dict[Any, list[int]] = {}
    for step in rows:
        if step.row is not None:
            numbers.setdefault(place_of(step.url), []).append(step.row)
    for index, fragment in enumerate(manifest.fragments):
        ids = [
            manifest_index.id_in_source(manifest, span, row)
            for span in fragment.spans
            for row in numbers.get(place_of(span.url), ())
            if span.start <= row < span.stop
        ]
        if ids:
            walk = _ForwardWalk(manifest_index, fragment)
            walk.steps += [source_step(manifest_index, manifest, index, id) for id in ids]
            walk.reached[SOURCE] = _StageRows(1, [(id,) for id in ids])
            yield walk.trace(SOURCE, ids[0])
