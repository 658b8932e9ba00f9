"""`IngestedSource`: files that are converted into Parquet in the store once, and read from there.

Planning converts each version of a file that the store lacks, in bounded memory, into pieces of at
most `PIECE_BYTES`. A record for each partition says which pieces a file has, and which types its
columns have. The types of the source are those that all values of the first run's files have; they
are kept in the store, so that a later file cannot change them. A span's detail has the pieces of
its rows, so that a worker reads these alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster import _failpoints
from vane_dagster._arguments import PLACEHOLDER, one_of
from vane_dagster.errors import DefinitionError, SchemaError, SourceError, names
from vane_dagster.sources.base import (
    ROW_ERROR,
    ROW_ERROR_TYPE,
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceTable,
    fragment_record,
    unreadable,
)
from vane_dagster.sources.conversion_tasks import call
from vane_dagster.sources.file import path_of
from vane_dagster.sources.file_source import FileSource, file_arguments
from vane_dagster.sources.files import file_identity, file_version
from vane_dagster.sources.grouping import FileSize, group, is_small
from vane_dagster.sources.piece_writer import PIECE_BYTES, PieceWriter
from vane_dagster.sources.text_stream import (
    MAX_LINE,
    RowTooLongError,
    TextStream,
    parse_encoding,
)
from vane_dagster.sources.text_types import MOST_MISFITS, TextTypes, cast_each, is_readable
from vane_dagster.storage.filesystem import IO_THREADS, Location
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.stored_tables import (
    KEPT_TYPES,
    RECORDS,
    ParquetRows,
    Piece,
    StoredTable,
    clipped,
    create_record,
    dumped_places,
    loaded_places,
    read_record,
    tables,
    write_record,
)
from vane_dagster.storage.transient_errors import with_retries
from vane_dagster.types.schema import SchemaLike, check_distinct, parse_schema, type_name

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store

SmallFiles = Literal["separate", "group"]
Converted = tuple[pa.Table, Mapping[str, Any]]
"""Rows of a file, and what they show of the types of its columns, as JSON values."""

_SMALL_BYTES = 1 << 20
"""Files below this size are converted together, if there are many."""
_SMALL_FILES = 256
"""Small files that are converted together."""
_FILES_A_CPU, _LOTS_A_CPU = 2, 8
"""Conversions at a time for each CPU: of a file, and of small files, which wait for requests."""
_ROUNDING = 1e-6
_VERSION = 1
"""Part of the identity of what is converted; another number converts all files again."""
_PATH = "path"
_DAY = 86_400.0


@dataclass(frozen=True)
class IngestedFile:
    """What the store has of a version of a file.

    Attributes:
        pieces: Its rows.
        types: What it shows of the types of its columns, by name, as JSON values.
    """

    pieces: tuple[Piece, ...]
    types: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """The size of its rows in memory."""
        return sum(piece.bytes for piece in self.pieces)

    def ranges(self, rule: FragmentRule) -> Iterator[tuple[int, int, int]]:
        """Cut the rows into ranges of at most a fragment; yields first, stop and bytes of each."""
        edges = np.cumsum([0, *(piece.rows for piece in self.pieces)])
        above = np.cumsum([0, *(piece.bytes for piece in self.pieces)])
        shares = [max(each.rows / rule.rows, each.bytes / rule.bytes) for each in self.pieces]
        filled = np.cumsum([0.0, *shares])  # fragments that the pieces fill
        ends = np.linspace(0, filled[-1], int(np.ceil(filled[-1] - _ROUNDING)) + 1)
        cuts = np.floor(np.interp(ends, filled, edges) + _ROUNDING).astype(int).tolist()
        for start, stop in itertools.pairwise(dict.fromkeys(cuts)):
            low, high = np.interp([start, stop], edges, above)
            yield start, stop, int(high - low)

    def detail(self, start: int, stop: int) -> str:
        """Return the detail of a span of its rows: the first one, and where they are."""
        places = (place for piece in self.pieces for place in piece.places)
        return f"{start} {dumped_places(list(clipped(places, start, stop)))}"


@dataclass(frozen=True)
class IngestedSource(FileSource):
    """Files that are converted into Parquet once.

    A subclass defines `convert`, `joined` and `common_type`, and sets `options` to the names of
    its attributes that change the rows.

    Attributes:
        is_text: Whether values are texts in the files.
        url: A local path or fsspec URL: a file, a folder or a glob. ``{partition_key}`` is replaced
            by the key, ``{partition_key.<dimension>}`` by one dimension of a multi-partition.
        asset: Key of the Dagster asset that writes the files, as "a/b", if there is one.
        allow_empty: Whether a partition with files but no rows is accepted.
        storage_options: Passed to fsspec; never part of a key.
        encoding: The encoding of the files.
        columns: The declared columns; None for those in the files.
        types: The declared types of some columns.
        include_paths: Whether there is a column `path`.
        small_files: "separate" or "group".
        root: The store's root, once the source is bound to it.
    """

    reads_contents: ClassVar[bool] = False  # the rows in the store are those of a version
    is_text: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("encoding",)
    columns: pa.Schema | None = None
    types: pa.Schema | None = None
    encoding: str = "utf-8"
    include_paths: bool = False
    small_files: SmallFiles = "group"
    root: Location | None = field(default=None, init=False, repr=False, compare=False)
    _connect: Callable[[], bool] | None = field(default=None, init=False, repr=False, compare=False)
    _listed: dict[str | None, tuple[FileRecord, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _pipeline: str = field(default="", init=False, repr=False, compare=False)

    # What a format defines.

    @abstractmethod
    def convert(self, stream: TextStream) -> Iterator[Converted]:
        """Read a file.

        Args:
            stream: The file.

        Yields:
            Its rows in order, in tables of bounded size, each with what it shows of the types of
            its columns. At least one table, possibly without rows.

        Raises:
            SourceError: If it cannot be read or parsed.
            RowTooLongError: If a row does not fit into the window of the stream.
        """

    @abstractmethod
    def joined(self, one: Any, other: Any) -> Any:
        """Return what two parts of a column show of its type together."""

    @abstractmethod
    def common_type(self, found: Sequence[Any]) -> pa.DataType | None:
        """Return the type of a column by what is known of it in several files; None if none fits.

        Args:
            found: What each file shows, as of `convert`.
        """

    @property
    def forms(self) -> TextTypes:
        """The forms of values in text."""
        return TextTypes()

    def cast(self, values: pa.Array, kind: pa.DataType) -> pa.Array:
        """Convert values to a type, of which none is changed.

        Args:
            values: The values, as `convert` yielded them: texts, or what stands for them.
            kind: The type.

        Raises:
            pa.ArrowInvalid: If one does not have the type.
        """
        return self.forms.cast(values.cast(pa.string()), kind)

    # Declaration.

    def describe(self) -> str:
        return f"{self.label} files at {self.url}"

    @property
    def splitting(self) -> str:
        grouped = "group small files, 1" if self.small_files == "group" else ""
        declared = [_types_text(each) for each in (self.columns, self.types)]
        return json.dumps([self.reading, declared, self.include_paths, grouped])

    @property
    def reading(self) -> str:
        """The text of everything in the declaration that changes how a file is converted."""
        values = {name: getattr(self, name) for name in self.options}
        return json.dumps([self.kind, _VERSION, values], sort_keys=True)

    def schema(self, location: str) -> pa.Schema:
        """Return the columns of the last file of all partitions, by its first rows."""
        if self.columns is not None:
            return self._schema(self.columns, location)
        source = replace(self, url=PLACEHOLDER.sub("*", self.url))
        files = source.required(source.list_files([None], location)[None], None, location)
        types: dict[str, Any] = {}
        tables = self.convert(self._stream(files[-1].url, location))
        for _, found_types in itertools.islice(tables, 2):  # the first one may have no rows
            types = self._joined(types, found_types)
        found = self._found_types([(files[-1].url, IngestedFile((), types))], location)
        return self._schema(self._declared(found), location)

    # Planning.

    def of_pipeline(self, name: str) -> Source:
        """Return the source with types of its own: another pipeline may have been there before."""
        return self._with(_pipeline=name)

    def bind(self, store: Store) -> Source:
        return self._with(root=store.root)

    def with_cluster(self, connect: Callable[[], bool]) -> Source:
        return self._with(_connect=connect)

    def for_workers(self) -> IngestedSource:
        return self._with()  # without what was listed, and without the cluster

    def _with(self, **given: Any) -> IngestedSource:
        made = replace(self)
        for name, value in {"root": self.root, "_pipeline": self._pipeline, **given}.items():
            object.__setattr__(made, name, value)
        return made

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        found = super().list_files(partitions, location)
        self._listed.update(
            (key, files) for key, files in found.items() if not isinstance(files, SourceError)
        )
        return found

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Convert the files that the store lacks, and cut the rows of all into fragments."""
        schema = self._schema(self._kept_types(files, location, partition), location)
        converted = self._ingested(files, location, partition)
        found = list(zip(files, converted))
        self._check_columns(found, schema, location)
        own = "\n".join(["", self.reading, *_types_text(schema)])
        fragments: list[FragmentRecord] = []
        small: dict[str, tuple[FileRecord, IngestedFile]] = {}
        for file, rows in found:
            size = FileSize(file.url, rows.rows, rows.bytes)
            if size.rows and self.small_files == "group" and is_small(size, rule.rows, rule.bytes):
                small[file.url] = (file, rows)
                continue
            for start, stop, held in rows.ranges(rule):
                detail = [rows.detail(start, stop)]
                fragments.append(fragment_record([(file, start, stop)], held, own, detail))
        sizes = [FileSize(url, rows.rows, rows.bytes) for url, (_, rows) in small.items()]
        for grouped in group(sizes, rule.rows, rule.bytes):
            members = [small[each.url] for each in grouped]
            spans = [(file, 0, rows.rows) for file, rows in members]
            details = [rows.detail(0, rows.rows) for _, rows in members]
            fragments.append(
                fragment_record(spans, sum(size.bytes for size in grouped), own, details)
            )
        fragments.sort(key=lambda fragment: fragment.url)  # stable: rows of a file stay in order
        partial = {
            name: urls
            for name in schema.names
            if name != _PATH
            and (urls := [f.url for f, r in found if r.rows and name not in r.types])
        }
        return SourceTable(schema, tuple(fragments), partial)

    def _ingested(
        self, files: Sequence[FileRecord], location: str, partition: str | None
    ) -> list[IngestedFile]:
        """Return what the store has of files, after those that it lacks are converted."""
        record = self._digest("files"), hashlib.sha256(self.url_for(partition).encode()).hexdigest()
        kept = read_record(self._root, *record)
        pieces: dict[str, list[Piece]] = {}
        for piece in kept.pieces if kept else ():
            pieces.setdefault(piece.identity, []).append(piece)
        facts = dict(kept.facts) if kept else {}
        written = facts.pop("written", 0.0)
        known = {
            key: IngestedFile(tuple(pieces.get(key, ())), types) for key, types in facts.items()
        }

        listed = {file.url: file for file in self._listed.get(partition, files)}
        found: dict[str, IngestedFile | SourceError] = {
            file.url: known[key] for file in files if (key := file_identity(file)) in known
        }
        lots = _lots([file for file in files if file.url not in found])
        on_cluster = bool(lots) and self._connect is not None and self._connect()
        reader = self.for_workers()

        def convert(lot: Sequence[FileRecord]) -> list[IngestedFile | SourceError]:
            own = {file.url: listed[file.url] for file in lot}
            per_cpu = _LOTS_A_CPU if len(lot) > 1 else _FILES_A_CPU
            return call(
                _convert, reader, lot, location, own, on_cluster=on_cluster, per_cpu=per_cpu
            )

        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            for lot, made in zip(lots, threads.map(convert, lots)):
                found.update(zip([file.url for file in lot], made))
        converted = {
            file_identity(file): rows
            for file in files
            if isinstance(rows := found[file.url], IngestedFile)
        }
        failed = [each for each in found.values() if isinstance(each, SourceError)]
        if converted != known or time.time() - written > _DAY:
            table = StoredTable(
                pa.schema([]),
                tuple(piece for rows in converted.values() for piece in rows.pieces),
                {key: dict(rows.types) for key, rows in converted.items()}
                | {"written": time.time()},
            )
            write_record(self._root, *record, table)
        if failed:
            raise _together(failed, location)
        return [converted[file_identity(file)] for file in files]

    def _ingest(
        self, files: Sequence[FileRecord], location: str, listed: Mapping[str, FileRecord]
    ) -> list[IngestedFile | SourceError]:
        """Convert files: a large one into pieces of its own, small ones into common pieces.

        Args:
            files: The files. One that was touched has its former version; see `files.reconcile`.
            location: The pipeline, for messages.
            listed: The files as they were listed, by URL.
        """
        keys = [file_identity(file) for file in files]
        found: list[Mapping[str, Any] | SourceError] = []
        with PieceWriter(self._root) as writer:
            for file, key in zip(files, keys):

                def convert(stream: TextStream, key: str = key) -> Mapping[str, Any]:
                    types: dict[str, Any] = {}
                    writer.begin(key)
                    for rows, shown in self.convert(stream):
                        types = self._joined(types, shown)
                        writer.write(rows)
                    return types

                try:
                    found.append(self._read_version(listed[file.url], convert, location))
                except SourceError as error:
                    writer.begin(key)  # again, without its rows
                    found.append(error)
        return [
            types if isinstance(types, SourceError) else IngestedFile(writer.pieces(key), types)
            for key, types in zip(keys, found)
        ]

    def _read_version(
        self, file: FileRecord, read: Callable[[TextStream], Any], location: str
    ) -> Any:
        """Read a file, and check that it is the listed version.

        Args:
            file: The file.
            read: Reads it. It is called again after a transient error, or with a larger window.
            location: The pipeline, for messages.
        """

        def whole() -> Any:
            stream = self._stream(file.url, location)
            while stream.window <= MAX_LINE:
                try:
                    return read(stream)
                except RowTooLongError:
                    stream = replace(stream, window=8 * stream.window)
            raise stream.refused(
                f"a row has more than {MAX_LINE >> 20} MiB. Check the quotes and the newlines"
            )

        before = self._current(file, location)
        if file_version(before) != file_version(file):
            raise _replaced(file, location)
        failed: SourceError | None = None
        try:
            found = with_retries(_failpoints.failing("read", file.url, whole))
        except SourceError as error:
            failed = error
        if file_version(self._current(file, location)) != file_version(before):
            raise _replaced(file, location)
        if failed is not None:
            raise failed
        return found

    def _joined(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        """Return what two parts of a file show of the types of its columns together."""
        both = {name: self.joined(one[name], other[name]) for name in one if name in other}
        return {**one, **other, **both}

    def _current(self, file: FileRecord, location: str) -> FileRecord:
        try:
            return with_retries(lambda: self.current(file))
        except Exception as error:  # drivers raise their own exception classes
            raise unreadable(file.url, error, location) from error

    # Types.

    def _kept_types(
        self, files: Sequence[FileRecord], location: str, partition: str | None
    ) -> pa.Schema:
        """Return the types of the source's columns, which the first run finds in all its files.

        Args:
            files: The files of a partition.
            location: The pipeline, for messages.
            partition: The partition's key.
        """
        if self.columns is not None:
            return self.columns
        identity = self._digest("types")
        with _one_at_a_time:
            kept = read_record(self._root, identity, KEPT_TYPES)
            if kept is None:
                found = [*zip(files, self._ingested(files, location, partition))]
                for key, others in self._listed.items():
                    if key != partition:
                        with suppress(SourceError):  # it is the other partition's error
                            found += zip(others, self._ingested(others, location, key))
                by_url = [(file.url, rows) for file, rows in found]
                types = StoredTable(self._found_types(by_url, location))
                kept = create_record(self._root, identity, types, KEPT_TYPES)
            elif pa.null() in kept.schema.types:  # a column had no value so far
                known = {column.name: column.type for column in kept.schema}
                rows = self._ingested(files, location, partition)
                for name in [name for name, kind in known.items() if pa.types.is_null(kind)]:
                    shown = [each.types[name] for each in rows if name in each.types]
                    known[name] = (self.common_type(shown) if shown else None) or pa.null()
                if pa.schema(known) != kept.schema:
                    kept = StoredTable(pa.schema(known))
                    write_record(self._root, identity, KEPT_TYPES, kept)
        return self._declared(kept.schema)

    def _declared(self, found: pa.Schema) -> pa.Schema:
        """Return columns with the declared types, and those without a value as text."""
        kinds = {f.name: pa.string() if pa.types.is_null(f.type) else f.type for f in found}
        return pa.schema(kinds | {column.name: column.type for column in self.types or ()})

    def _found_types(self, files: Sequence[tuple[str, IngestedFile]], location: str) -> pa.Schema:
        """Return the types that all values of some files have."""
        found: dict[str, dict[str, Any]] = {}
        for url, rows in files:
            check_distinct(list(rows.types), f"{location}, {url!r}")
            for name, kind in rows.types.items():
                found.setdefault(name, {})[url] = kind
        if not found:
            raise SourceError(
                f"{location}: {files[0][0]!r} has no row to find columns in. Declare them by "
                "schema=, or write the file again"
            )
        check_distinct(list(found), location)
        declared = self.types or pa.schema([])
        kinds: dict[str, pa.DataType] = {}
        for name, by_file in found.items():
            kind = self.common_type(list(by_file.values()))
            if kind is None and name in declared.names:
                kind = pa.null()
            if kind is None:
                raise SourceError(
                    f"{location}: column {name!r} has values without a common type, in "
                    f"{names(sorted(by_file), 3)}. Declare its type for all files, by types= or "
                    "schema=, or take files out of the source"
                )
            kinds[name] = kind
        return pa.schema(kinds)

    def _schema(self, kinds: pa.Schema, location: str) -> pa.Schema:
        """Return the columns of the rows."""
        if not self.include_paths:
            return kinds
        if _PATH in (name.lower() for name in kinds.names):
            raise SourceError(
                f"{location}: the files have a column {_PATH!r} of their own. Leave "
                "include_paths=True out, or rename the column"
            )
        return kinds.append(pa.field(_PATH, pa.string()))

    def _check_columns(
        self, files: Sequence[tuple[FileRecord, IngestedFile]], schema: pa.Schema, location: str
    ) -> None:
        """Refuse a declared column that no file has, and a file without any of the columns."""
        known = {name for _, rows in files for name in rows.types}
        declared = self.types or (self.columns if self.is_text else None) or pa.schema([])
        unknown = [name for name in declared.names if name not in known]
        if unknown and any(rows.rows for _, rows in files):
            raise SourceError(
                f"{location}: no file has the column {unknown[0]!r} of schema= or types=; "
                f"{files[0][0].url!r} has {names(list(files[0][1].types), 10)}"
            )
        for file, rows in files:
            _check_names(file, rows, schema, location)

    # Reading.

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read rows from the store, and cast them. A value that does not fit is its row's error."""
        wanted = [name for name in schema.names if not (self.include_paths and name == _PATH)]
        pieces = self._pieces(fragment, wanted, context)
        columns: dict[str, list[pa.Array]] = {name: [] for name in wanted}
        errors: dict[int, str] = {}
        edges = np.cumsum([0, *(rows.num_rows for _, _, rows in pieces)])
        first = 0
        for _, same in itertools.groupby(pieces, lambda piece: piece[2].schema):
            rows = pa.concat_tables([rows for _, _, rows in same]).combine_chunks()
            for name in wanted:
                values, misfits = self._cast(rows, schema.field(name), fragment, context)
                columns[name] += values.chunks
                for place in misfits:
                    errors.setdefault(first + place, name)
            first += rows.num_rows
        made = {
            name: pa.chunked_array(columns[name], schema.field(name).type)
            if name in columns
            else pa.chunked_array([pa.repeat(path_of(url), len(rows)) for url, _, rows in pieces])
            for name in schema.names
        }
        table = pa.table(made, schema=schema)
        if not errors:
            return table
        faults: list[Any] = [None] * first
        for place, name in errors.items():
            index = int(np.searchsorted(edges, place, "right")) - 1
            url, number, _ = pieces[index]
            row = number + place - int(edges[index]) + 1
            message = _misfit(url, row, schema.field(name))
            faults[place] = {"error": "SourceError", "message": message}
        return table.append_column(ROW_ERROR, pa.array(faults, ROW_ERROR_TYPE))

    def find(
        self, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row; in the files as they are now if their rows in the store were collected."""
        try:
            return super().find(spans, column, id)
        except _GoneError:
            return super().find([replace(span, detail="") for span in spans], column, id)

    def _pieces(
        self, fragment: FragmentRecord, wanted: Sequence[str], context: ReadContext
    ) -> list[tuple[str, int, pa.Table]]:
        """Read the pieces of a fragment: of each the file, its first row there, and the rows."""
        placed = [(span, self._places(span, context)) for span in fragment.spans]
        ranges: dict[str, tuple[int, int]] = {}  # of each file in the store
        for place in itertools.chain.from_iterable(places for _, places in placed):
            low, high = ranges.get(place.name, (place.start, place.stop))
            ranges[place.name] = min(low, place.start), max(high, place.stop)

        def stored(name: str) -> pa.Table:
            return self._stored(ParquetRows(name, *ranges[name]), wanted, fragment, context)

        if len(ranges) == 1:
            tables = {name: stored(name) for name in ranges}
        else:
            with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
                tables = dict(zip(ranges, threads.map(stored, ranges)))
        found = []
        for span, places in placed:
            number = span.start
            for place in places:
                low, _ = ranges[place.name]
                rows = tables[place.name].slice(place.start - low, place.stop - place.start)
                found.append((span.url, number, rows))
                number += rows.num_rows
        return found

    def _cast(
        self, rows: pa.Table, column: pa.Field, fragment: FragmentRecord, context: ReadContext
    ) -> tuple[pa.ChunkedArray, Sequence[int]]:
        """Cast a column of rows in the store; see `cast_each`."""
        if rows.schema.get_field_index(column.name) < 0:
            return pa.chunked_array([pa.nulls(rows.num_rows, column.type)]), ()
        values = rows.column(column.name)
        if values.type == column.type:
            return values, ()
        try:
            return cast_each(values, column.type, lambda part: self.cast(part, column.type))
        except pa.ArrowInvalid as error:
            raise SourceError(
                f"{context.location}: {fragment}: column {column.name!r} has more than "
                f"{MOST_MISFITS:,} values that are no {type_name(column.type)}. Declare a type "
                f"that all have, for example types={{{column.name!r}: 'VARCHAR'}}"
            ) from error

    def _places(self, span: FileSpan, context: ReadContext) -> list[ParquetRows]:
        """Return the pieces of a span; those of the file as it is now, if it has no detail."""
        detail = span.detail
        if not detail:
            file = self._current(FileRecord(span.url, 0, ""), context.location)
            (rows,) = self._ingest([file], context.location, {file.url: file})
            if isinstance(rows, SourceError):
                raise rows
            detail = rows.detail(span.start, span.stop)
        first, _, text = detail.partition(" ")
        places = clipped(loaded_places(text), span.start - int(first), span.stop - int(first))
        return [place for place in places if isinstance(place, ParquetRows)]

    def _stored(
        self,
        place: ParquetRows,
        wanted: Sequence[str],
        fragment: FragmentRecord,
        context: ReadContext,
    ) -> pa.Table:
        """Read rows of a file in the store: the wanted columns that it has."""
        folder = tables(self._root)

        def read() -> pa.Table:
            with (
                folder.fs.open(folder.file(place.name), "rb") as stream,
                pq.ParquetFile(stream) as f,
            ):
                sizes = [f.metadata.row_group(i).num_rows for i in range(f.num_row_groups)]
                edges = np.cumsum([0, *sizes])
                first = int(np.searchsorted(edges, place.start, "right")) - 1
                last = int(np.searchsorted(edges, place.stop, "left"))
                own = set(f.schema_arrow.names)
                present = [name for name in wanted if name in own]
                if not present:
                    rows = pa.nulls(place.stop - place.start)
                    return pa.table([rows], names=["\0"])
                found = f.read_row_groups(
                    list(range(first, last)), columns=present, use_threads=False
                )
                start = place.start - int(edges[first])
                return found.select(present).slice(start, place.stop - place.start)

        try:
            return with_retries(_failpoints.failing("read", folder.file_url(place.name), read))
        except FileNotFoundError as error:
            records = folder.child(RECORDS, self._digest("files")).url
            raise _GoneError(
                f"{context.location}: the rows of {fragment} are no longer in the store, at "
                f"{folder.file_url(place.name)!r}. If that file was deleted, delete {records!r} "
                "too, and run the partition again"
            ) from error
        except Exception as error:  # drivers raise their own exception classes
            raise unreadable(folder.file_url(place.name), error, context.location) from error

    # Details.

    @property
    def _root(self) -> Location:
        assert self.root is not None, f"{self.place} is bound to a store before it is read"
        return self.root

    def _digest(self, what: str) -> str:
        pipeline = self._pipeline if what == "types" else ""
        text = "\n".join([what, self.url, self.reading, pipeline])
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    def _stream(self, url: str, location: str) -> TextStream:
        return TextStream(url, self.encoding, location, self.options_for(url))


def _check_names(file: FileRecord, rows: IngestedFile, schema: pa.Schema, location: str) -> None:
    """Refuse a file with rows whose columns have other names than those of the source."""
    if not rows.rows:
        return
    names_kept = {name.lower(): name for name in schema.names}
    for name in rows.types:
        if (kept := names_kept.get(name.lower(), name)) != name:
            raise SourceError(
                f"{location}: {file.url!r} has the column {name!r}, which is {kept!r} in other "
                "files. Rename it"
            )
    if rows.types and not any(name.lower() in names_kept for name in rows.types):
        raise SourceError(
            f"{location}: {file.url!r} has none of the columns {names(schema.names, 10)}, but "
            f"{names(list(rows.types), 10)}. Check its header, or take it out of the source"
        )


class _GoneError(SourceError):
    """Rows in the store were collected or deleted."""


_one_at_a_time = threading.Lock()


def shared_options(
    where: str,
    url: str | os.PathLike[str],
    asset: Any,
    allow_empty: bool,
    storage_options: Mapping[str, Any] | None,
    encoding: str,
    small_files: str,
) -> dict[str, Any]:
    """Validate the arguments that all formats have.

    Args:
        where: The function, for messages.
        url: The URL pattern.
        asset: The asset that writes the files.
        allow_empty: Whether a partition without rows is accepted.
        storage_options: Options of the fsspec file system.
        encoding: The encoding of the files.
        small_files: "separate" or "group".

    Returns:
        The attributes of an `IngestedSource`.

    Raises:
        DefinitionError: If one is wrong.
    """
    url, writer, allow_empty, options = file_arguments(
        where, url, asset, storage_options, allow_empty
    )
    one_of(where, "small_files", small_files, ("separate", "group"))
    return {
        "url": url,
        "asset": writer,
        "allow_empty": allow_empty,
        "storage_options": options,
        "encoding": parse_encoding(where, encoding),
        "small_files": small_files,
    }


def declared_types(
    where: str,
    schema: SchemaLike | None,
    types: SchemaLike | None,
    is_accepted: Callable[[pa.DataType], bool] = is_readable,
) -> tuple[pa.Schema | None, pa.Schema | None]:
    """Validate the columns and types that a declaration pins.

    Args:
        where: The function, for messages.
        schema: All columns, with their types.
        types: The types of some columns.
        is_accepted: Whether the format can have values of a type.

    Raises:
        DefinitionError: If both are given.
        SchemaError: If a type is unknown, or the format cannot have it.
    """
    if schema is not None and types is not None:
        raise DefinitionError(
            f"{where}: schema and types are both given; schema names all columns, types those "
            "whose type is not to be found in the files. Give one"
        )
    parsed = [None if each is None else parse_schema(each, where) for each in (schema, types)]
    for declared in parsed:
        for column in declared or ():
            if not is_accepted(column.type):
                raise SchemaError(
                    f"{where}: column {column.name!r} is {type_name(column.type)}, which is not "
                    "read from such files; declare VARCHAR, and convert it in the pipeline"
                )
    return parsed[0], parsed[1]


def _misfit(url: str, row: int, column: pa.Field) -> str:
    return (
        f"{url!r}, row {row}: column {column.name!r} has a value that is no "
        f"{type_name(column.type)}. Fix the file, or declare a type that every value of the "
        f"column has, for example types={{{column.name!r}: 'VARCHAR'}}"
    )


def _convert(
    source: IngestedSource,
    files: Sequence[FileRecord],
    location: str,
    listed: Mapping[str, FileRecord],
) -> list[IngestedFile | SourceError]:
    """See `IngestedSource._ingest`, which a task of the cluster calls."""
    return source._ingest(files, location, listed)


def _lots(files: Sequence[FileRecord]) -> list[list[FileRecord]]:
    """Divide files: several small ones are converted together, and each large one alone."""
    small: list[list[FileRecord]] = []
    size = 0
    for file in (file for file in files if file.size < _SMALL_BYTES):
        if not small or len(small[-1]) == _SMALL_FILES or size + file.size > PIECE_BYTES:
            small.append([])
            size = 0
        small[-1].append(file)
        size += file.size
    return [*small, *([file] for file in files if file.size >= _SMALL_BYTES)]


def _types_text(schema: pa.Schema | None) -> list[str]:
    return [f"{column.name}: {column.type}" for column in schema or ()]


def _replaced(file: FileRecord, location: str) -> SourceError:
    return SourceError(
        f"{location}: {file.url!r} was replaced while the run read it. Run the partition again"
    )


def _together(errors: Sequence[SourceError], location: str) -> SourceError:
    """Return one error for all files that cannot be read."""
    if len(errors) == 1:
        return errors[0]
    texts = [str(error).removeprefix(f"{location}: ") for error in errors]
    more = f"; and {len(texts) - 5} more files" if len(texts) > 5 else ""
    return SourceError(f"{location}: {len(texts)} files: {'; '.join(texts[:5])}{more}")
