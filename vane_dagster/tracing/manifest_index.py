"""The manifests of a pipeline in one partition, and the files that contain their rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._secrets import masked
from vane_dagster._texts import count
from vane_dagster.errors import SourceError, StoreError, TraceError, described, names
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.sources import Source, TableReader
from vane_dagster.sources.base import SourceReader
from vane_dagster.sources.delta import DeltaSource
from vane_dagster.sources.files import reconcile
from vane_dagster.sources.images import ImagesSource
from vane_dagster.sources.lance import LanceSource
from vane_dagster.sources.parquet import PARQUET
from vane_dagster.sources.raw_files import FilesSource
from vane_dagster.sources.row_ids import rule_of
from vane_dagster.sources.stored import StoredSource
from vane_dagster.storage.adoptions import Adoptions, adoptions, latest
from vane_dagster.storage.definition_texts import read_texts
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import (
    FileRecord,
    FileSpan,
    FragmentRecord,
    Manifest,
)
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.reader import with_rows
from vane_dagster.storage.row_records import (
    AT,
    CODE,
    ID,
    MODEL,
    ORIGIN,
    RUN_ID,
    parse_code,
)
from vane_dagster.storage.row_search import Found, find
from vane_dagster.storage.sample import sample_rows, short_text
from vane_dagster.storage.store import Store
from vane_dagster.storage.stored_tables import identity_of
from vane_dagster.tracing.steps import RowOrigin
from vane_dagster.types.kinds import is_bytes, is_floats
from vane_dagster.types.tensors import is_tensor

Wanted = dict[int, dict[Any, Sequence[Any] | None]]
"""Rows to find, by key position: the values there, each with all keys of the row if known."""

_MESSAGES = 240
"""Characters of a prompt's messages that are shown."""
_NAMED = 3
"""Partitions that an error names: the key of each is in its manifest."""
_READ_AS_RECORDED: Mapping[str, Callable[..., Source]] = {
    each.kind: each for each in (DeltaSource, FilesSource, ImagesSource, LanceSource)
}
"""Sources whose files can be read by what a manifest records, with the store's options."""


class ManifestIndex:
    """Reads a pipeline's manifests in a partition; each manifest is opened once."""

    def __init__(
        self, store: Store, pipeline: str, partition: str | None, source: Source | None = None
    ) -> None:
        self.store, self.pipeline, self.partition = store, pipeline, partition
        self.source = (source or StoredSource(pipeline)).bind(store)
        self._name_of = functools.cache(
            lambda stage: store.latest(pipeline, stage, [partition]).get(partition)
        )
        self._opened = functools.cache(functools.partial(store.opened_if_there, pipeline))
        self._read = functools.lru_cache(maxsize=2)(read_part)  # a part, and records of rows
        if pipeline.startswith("~") or not self.stages:
            others = names(each for each in pipelines(store) if each != pipeline)
            raise TraceError(
                f"{store.described} has no pipeline {pipeline!r} with results; it has {others}"
            )

    @cached_property
    def _adoptions(self) -> Mapping[str, Adoptions]:
        return adoptions(self.store, self.pipeline)

    def adopted(self, manifest: Manifest) -> list[str]:
        """Return a line about how a stage's definition came to count as one with others."""
        adopted = self._adoptions[manifest.stage].of(manifest.definition)
        return latest([each.since for each in adopted])

    @cached_property
    def stages(self) -> Sequence[str]:
        """The stages that were materialized in any partition."""
        return self.store.stages(self.pipeline)

    def origin(self, manifest: Manifest, index: int, id: Any) -> RowOrigin | None:
        """Where an outcome was computed that a part copied; else None."""
        part = manifest.parts[index]
        if not part.row_records or part.made is None:
            return None
        try:
            folder = self.store.parts_of(manifest)
            records = self._read(folder, part.row_records, (ID, *ORIGIN))
        except StoreError:
            return None
        ids = records.column(ID)
        if (row := pc.index(ids, pa.scalar(id, ids.type)).as_py()) < 0:
            return None
        values = {name: records.column(name)[row].as_py() for name in ORIGIN}
        if values[RUN_ID] == part.made.run_id:
            return None
        code, _ = parse_code(values[CODE])
        return RowOrigin(values[RUN_ID], values[MODEL], code, values[AT].timestamp())

    def values(self, manifest: Manifest, definition: str, row: Found) -> Mapping[str, str]:
        """Return the values of a stage's row besides its keys, and the messages of a prompt."""
        values: dict[str, str] = {}
        with contextlib.suppress(StoreError, FileNotFoundError):
            if manifest.kind == "prompt":
                texts = read_texts(self.store, self.pipeline, manifest.stage, definition) or {}
                if messages := texts.get("messages"):  # empty if a function makes them
                    values["messages"] = short_text(messages, _MESSAGES)
            columns = _shown(with_rows(self.store, manifest).schema, manifest.keys)
            part = self._read(row.folder, row.name, tuple(columns.names))
            values |= _texts(part.select(columns.names), row.row)
        return values

    def source_values(self, manifest: Manifest, span: FileSpan, row: int) -> Mapping[str, str]:
        """Return the values of a row of the source besides its id, if its object is known."""
        if self.source.kind == (manifest.source or PARQUET):
            with contextlib.suppress(Exception):  # as drivers raise; the trace goes on without
                columns = _shown(self.source.schema("trace"), [self.source_id(manifest)])
                rows = FragmentRecord(span.url, span.start, span.stop, "", 0, detail=span.detail)
                read = self.source.read(rows, columns, "trace").select(columns.names)
                return _texts(read, row - span.start)
        return {}

    def label(self, stage: str) -> str:
        """Return a stage's label for messages."""
        return f"{self.pipeline}/{stage}"

    def require(self, stage: str) -> tuple[str, Manifest]:
        """Return the name and the content of a stage's manifest in force."""
        if stage not in self.stages:
            known = [self.label(known) for known in self.stages]
            raise TraceError(
                f"{self.label(stage)!r} was never materialized into {self.store.described}; "
                f"pipeline {self.pipeline!r} has {names(known, 20)}"
            )
        manifest = self.in_force(stage)
        if manifest is None:
            raise TraceError(self._never(stage))
        return manifest

    def in_force(self, stage: str) -> tuple[str, Manifest] | None:
        """Return the name and the content of a stage's manifest in force; None if there is none."""
        name = self._name_of(stage)
        manifest = None if name is None else self.open(stage, str(name))
        return None if manifest is None else (str(name), manifest)

    def open(self, stage: str, name: str) -> Manifest | None:
        """Return a manifest by name; None if it was garbage-collected."""
        return self._opened(stage, partition_folder(self.partition), name)

    def above(self, manifest: Manifest, stage: str) -> Manifest | None:
        """Return the manifest of an upstream stage that another manifest was made from."""
        name = manifest.upstream.get(stage)
        return None if name is None else self.open(stage, name)

    def shape(self, stage: str) -> Manifest | None:
        """Return a manifest that records a stage's inputs: from this partition, else from any."""
        if in_force := self.in_force(stage):
            return in_force[1]
        for folder, name in self.store.latest_of_all(self.pipeline, stage).items():
            return self.store.opened(self.pipeline, stage, folder, str(name))
        return None

    def published(self, manifest: Manifest, index: int) -> tuple[str, ...]:
        """Return the URLs of the files to which a `write` stage has published a part.

        If files hold several parts, these are all files of the partition.
        """
        made = manifest.published
        if made is None:
            return ()
        own = [name for name in made.files if manifest.parts[index].stem in name]
        return tuple(f"{made.url.rstrip('/')}/{name}" for name in own or made.files)

    def find(self, manifest: Manifest, index: int, wanted: Wanted) -> list[Found]:
        """Return the rows of a part with wanted values of their keys, in order."""
        if not manifest.parts[index].rows:
            return []
        stored = with_rows(self.store, manifest)
        part = self.store.parts_of(stored), stored.parts[index].name
        hits = (find(*part, manifest.keys, place, values) for place, values in wanted.items())
        by_row = {hit.row: hit for each in hits for hit in each}
        return [by_row[row] for row in sorted(by_row)]

    def locate(self, manifest: Manifest, id: Any) -> tuple[int, Found] | None:
        """Find the row of a stage by id."""
        parts = enumerate(manifest.parts)
        indexes = [i for i, part in parts if part.rows and part.id_min <= id <= part.id_max]
        stored = with_rows(self.store, manifest)
        folder, names = self.store.parts_of(stored), [stored.parts[i].name for i in indexes]
        hits = in_threads(lambda name: find(folder, name, manifest.keys, 0, [id]), names)
        return next(((index, hit[0]) for index, hit in zip(indexes, hits) if hit), None)

    def find_in_source(
        self, manifest: Manifest, spans: Sequence[FileSpan], id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row of the source by id."""
        name, kind = self.source_id(manifest), manifest.schema.field(manifest.keys[-1]).type
        column = pa.field(name, kind)
        rule = rule_of(manifest.id_rule, name) if manifest.id_rule else None
        in_store = bool(spans) and identity_of(spans[0].url) is not None
        # The store is read whatever the pipeline declares now.
        source = (
            TableReader(manifest.root or self.store.root) if in_store else self._source_of(manifest)
        )
        if source is None and (rule is None or rule.columns):
            raise StoreError(
                f"the files are of a source of kind {manifest.source!r}, which the store alone "
                "cannot read; trace with the stage's object: vd.trace(stage, id), or "
                "`vane-dagster trace` with -f or -m"
            )
        try:
            if rule is not None:
                return rule.find(source, spans, column, id)
            assert source is not None
            return source.find(spans, column, id)
        except SourceError as error:
            raise StoreError(str(error)) from error

    def id_in_source(self, manifest: Manifest, span: FileSpan, row: int) -> Any:
        """Return the id of a row of the source that is a row of another pipeline."""
        name, kind = self.source_id(manifest), manifest.schema.field(manifest.keys[-1]).type
        fragment = FragmentRecord(span.url, row, row + 1, "", 0, detail=span.detail)
        columns = pa.schema([(name, kind)])
        if manifest.id_rule:
            ids = rule_of(manifest.id_rule, name).read(self.source, fragment, columns, "trace")
        else:
            ids = self.source.read(fragment, columns, "trace")
        return ids[name][0].as_py()

    def _source_of(self, manifest: Manifest) -> SourceReader | None:
        """Return a source that reads the files of a manifest; None if only its declaration does."""
        kind = manifest.source or PARQUET
        if kind == self.source.kind:
            return self.source
        options = self.store.root.storage_options
        known = _READ_AS_RECORDED.get(kind)
        return None if known is None else known(url="", storage_options=options)

    def converted(self, manifest: Manifest, position: int, stage: str, id: Any) -> Any:
        """Convert the id that a user names to a value of a key column."""
        label, column = self.label(stage), manifest.keys[position]
        if isinstance(id, (tuple, list, Mapping)):
            raise TraceError(
                f"{label!r}: id is {id!r}; expected one value of {column!r}. An id of several "
                "columns is a text like 'a|3', one of file and row number a text like 'a.parquet#3'"
            )
        return as_id(id, manifest.schema.field(column).type, label, column)

    def source_id(self, manifest: Manifest) -> str:
        """Return the source's id column, which stages may have renamed."""
        column = manifest.keys[-1]
        while pairs := manifest.lineage.get(column):
            node, column = pairs[0]
            upstream = None if node == SOURCE else self.above(manifest, node)
            if upstream is None:
                break
            manifest = upstream
        return column

    def changed(self, manifest: Manifest, recorded: FileRecord) -> str | None:
        """Describe how a source file has changed since it was recorded."""
        source = self._source_of(manifest)
        if identity_of(recorded.url) or source is None:
            return None  # another content of a stored table is another table
        try:
            now = source.current(recorded)
        except FileNotFoundError:
            return "the file no longer exists"
        except Exception as error:  # drivers raise many exception classes of their own
            return masked(f"the file cannot be inspected: {described(error)}")
        (kept,) = reconcile([now], [recorded], source)
        if (kept.size, kept.version) == (recorded.size, recorded.version):
            return None
        return (
            f"the file has changed since; it now has {now.size:,} bytes and version {now.version}"
        )

    def _never(self, stage: str) -> str:
        label = self.label(stage)
        places = sorted(self.store.latest_of_all(self.pipeline, stage).items(), reverse=True)
        opened = [self.store.opened(self.pipeline, stage, f, str(n)) for f, n in places[:_NAMED]]
        keys = [*(each.partition for each in opened), *places[_NAMED:]]
        has = f"it has {count(len(keys), 'partition')}: {names(keys, _NAMED)}"
        if self.partition is None and keys:
            return f"{label!r} is partitioned: name one with --partition, or partition=; {has}"
        return (
            f"{label!r} was never materialized for partition {self.partition!r} into "
            f"{self.store.described}; {has}"
        )


def as_id(text: Any, kind: pa.DataType, label: str, column: str) -> Any:
    """Convert an id to the type of the id column."""
    if not pa.types.is_integer(kind):
        return str(text)
    try:
        if isinstance(text, (bool, float)):
            raise ValueError
        return pa.scalar(int(text), kind).as_py()
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        raise TraceError(
            f"{label!r}: id is {text!r}; its column {column!r} is {kind}, so expected a whole "
            "number in its range"
        ) from None


def aligned(
    rows: Sequence[Sequence[Any]], depth: int, other: int
) -> tuple[int, dict[Any, Sequence[Any] | None]]:
    """Return which rows of a neighboring stage correspond to some rows of a stage.

    Keys are compared from the end, because the source's id is the last one. A neighbor with more
    keys has many rows for each row; a neighbor with fewer keys has one row for many.
    """
    if other > depth:
        return other - depth, {row[0]: None for row in rows}
    return 0, {row[depth - other]: row[depth - other :] for row in rows}


def file_of(manifest: Manifest, url: str) -> FileRecord | None:
    """Return a source file as a manifest recorded it."""
    return next((file for file in manifest.files if file.url == url), None)


def fragment_index(manifest: Manifest, fragment: FragmentRecord) -> int | None:
    """Return the index of a fragment in a manifest; None if the manifest does not contain it."""
    identities = [each.identity for each in manifest.fragments]
    return identities.index(fragment.identity) if fragment.identity in identities else None


def _shown(schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """Return the columns whose values a trace shows: no keys, vectors, tensors and bytes."""
    large = is_floats, is_tensor, is_bytes
    return pa.schema(
        [f for f in schema if f.name not in keys and not any(test(f.type) for test in large)]
    )


def _texts(rows: pa.Table, row: int) -> Mapping[str, str]:
    return next(iter(sample_rows(rows.slice(row), 1)), {})


def pipelines(store: Store) -> list[str]:
    """Return the names of a store's pipelines."""
    folders = {name for each in store.layers for name in each.root.folders()}
    return sorted(name for name in folders if not name.startswith("~"))
