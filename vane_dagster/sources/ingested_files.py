"""`IngestedSource`: files that are converted into Parquet in the store once, and read from there.

Planning converts each version of a file that the store lacks, in bounded memory, into pieces of at
most `PIECE_BYTES`. A record for each partition says which pieces a file has, and which types its
columns show; see `column_types`. The types of the source are those that all values of the first
run's files have; they are kept in the store, so that a later file cannot change them. A span's
detail has the pieces of its rows, so that a worker reads these alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, ClassVar, Self

import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._keywords import require_columns
from vane_dagster._texts import in_partition
from vane_dagster.errors import DefinitionError, SchemaError, SourceError, names
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import (
    ROW_ERROR,
    ROW_ERROR_TYPE,
    Connect,
    FragmentRule,
    Listed,
    Source,
    SourceTable,
)
from vane_dagster.sources.column_types import (
    MIXED,
    check_castable,
    joined,
    shown,
)
from vane_dagster.sources.conversion_tasks import call
from vane_dagster.sources.file import path_of
from vane_dagster.sources.file_source import FileSource, file_arguments
from vane_dagster.sources.files import file_identity
from vane_dagster.sources.grouping import SizedFile, divide
from vane_dagster.sources.in_store import InStore
from vane_dagster.sources.piece_writer import PieceWriter
from vane_dagster.sources.planned_read import check_unchanged
from vane_dagster.sources.raw_files import PATH
from vane_dagster.sources.table_reader import TableReader
from vane_dagster.sources.text_stream import UTF_8, TextStream, parse_encoding
from vane_dagster.sources.text_types import cast_each, cast_text, is_readable
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.stored_tables import (
    INGESTED,
    ParquetRows,
    Piece,
    StoredTable,
    borrow,
    clipped,
    dumped_places,
    has_all_rows,
    keep_types,
    kept_types,
    write_record,
)
from vane_dagster.storage.stored_tables import joined as joined_places
from vane_dagster.types.casts import checked_cast
from vane_dagster.types.kinds import mapped
from vane_dagster.types.schema import (
    SchemaLike,
    check_column_names,
    parse_schema,
    read_schema,
    schema_record,
    type_name,
)

_SMALL_BYTES = 1 << 20
"""Files below this size are converted together, if there are many."""
_SMALL_FILES = 128
"""Small files that are converted together."""
_FILES_A_CPU, _LOTS_A_CPU = 1, 8
"""Conversions at a time for each CPU: of a file, and of small files, which wait for requests."""
_VERSION = 1
"""Part of the identity of what is converted; another number converts all files again."""

_Lot = Sequence[tuple[str, FileRecord]]
"""Files that are converted together, each with the identity of its version."""
_Files = Sequence[tuple[FileRecord, StoredTable]]
"""Files, each with what the store has of it."""


@dataclass(frozen=True)
class IngestedSource(FileSource, InStore):
    """Files that are converted into Parquet once.

    A subclass defines `convert`. Its own attributes are options of a format that change the rows.

    Attributes:
        is_text: Whether values are texts in the files.
        url: A local path or fsspec URL: a file, a folder or a glob. ``{partition_key}`` is replaced
            by the key, ``{partition_key.<dimension>}`` by one dimension of a multi-partition,
            ``{partition_start:%Y/%m}`` and ``{partition_end}`` by the bounds of a time window.
        asset: Key of the Dagster asset that writes the files, such as "a/b"; None for none.
        allow_empty: Whether a partition without files or rows is accepted.
        storage_options: Passed to fsspec; never part of a key.
        encoding: The encoding of the files.
        columns: The declared columns; None for those in the files.
        types: The declared types of some columns.
        include_paths: Whether there is a column `path`.
        connect: Connects to the run's cluster; see `with_cluster`.
    """

    reads_contents: ClassVar[bool] = False  # the rows in the store are those of a version
    is_text: ClassVar[bool] = True
    columns: pa.Schema | None = None
    types: pa.Schema | None = None
    encoding: str = UTF_8
    include_paths: bool = False
    connect: Connect | None = field(default=None, repr=False, compare=False)
    _listed: dict[str | None, tuple[FileRecord, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # What a format defines.

    @abstractmethod
    def convert(self, stream: TextStream) -> Iterator[pa.Table]:
        """Read a file."""

    def shown(self, rows: pa.Table) -> pa.Schema:
        """Return what rows show of the types of their columns; see `column_types`."""
        return pa.schema([shown(*column) for column in zip(rows.column_names, rows.columns)])

    def cast(self, column: pa.Field, is_found: bool, values: pa.Array) -> pa.Array:
        """Convert values to the type of a column without changing any of them."""
        own, kind = values.type, column.type
        is_number = pa.types.is_integer(own) or pa.types.is_floating(own)
        if pa.types.is_string(own) or (is_number and pa.types.is_decimal(kind)):
            return cast_text(values.cast(pa.string()), kind, is_found)
        check_castable(own, kind)
        return checked_cast(values, kind)

    # Declaration.

    @classmethod
    def declared(
        cls,
        url: str | os.PathLike[str],
        schema: SchemaLike | None,
        types: SchemaLike | None,
        include_paths: bool,
        asset: Any,
        allow_empty: bool,
        storage_options: Mapping[str, Any] | None,
        encoding: str = UTF_8,
        **own: Any,
    ) -> Self:
        """Validate the arguments that all formats have."""
        where = f"vd.{cls.kind}"
        if schema is not None and types is not None:
            raise DefinitionError(
                f"{where}: schema and types are both given; schema declares all columns, types "
                "only some. Pass one of them"
            )
        given = schema if types is None else types
        pinned = None if given is None else parse_schema(given, where)
        for column in pinned or ():
            if cls.is_text and not is_readable(column.type):
                raise SchemaError(
                    f"{where}: column {column.name!r} is {type_name(column.type)}, which is not "
                    "read from such files; declare VARCHAR, and convert it in the pipeline"
                )
        return cls(
            *file_arguments(where, url, asset, storage_options, allow_empty),
            encoding=parse_encoding(where, encoding),
            columns=pinned if types is None else None,
            types=pinned if types is not None else None,
            include_paths=include_paths,
            **own,
        )

    _types_note = " (Columns that types= does not declare have the types of the first run's files)"

    @property
    def splitting(self) -> str:
        declared = [_types_text(each) for each in (self.columns, self.types)]
        return json.dumps([self.reading, declared, self.include_paths, "group small files, 1"])

    @property
    def reading(self) -> str:
        """The text of everything in the declaration that changes how a file is converted."""
        known = {each.name for each in fields(IngestedSource)} - {"encoding"}
        own = [each.name for each in fields(self) if each.name not in known]
        values = {name: getattr(self, name) for name in own}
        return json.dumps([self.kind, _VERSION, values], sort_keys=True)

    def schema(self, location: str) -> pa.Schema:
        """Return the kept columns, else those of the last file of all partitions."""
        if self.columns is not None:
            return self._schema(self.columns, location)
        place = self.pipeline, self._digest("types")
        if self.store and (kept := kept_types(self.store, *place)):
            return self._schema(kept, location)
        files = self._all_files(location)
        tables = self.convert(self._stream(files[-1].url, location))
        first = map(self.shown, itertools.islice(tables, 2))  # one may have no rows
        converted = StoredTable(reduce(joined, first))
        return self._schema(self._found_types([(files[-1], converted)], location), location)

    # Planning.

    def with_cluster(self, connect: Connect) -> Source:
        return replace(self, connect=connect)

    def for_workers(self) -> IngestedSource:
        return replace(self, connect=None)  # without what was listed

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        listed = super().list_files(partitions, location)
        self._listed.update({key: each for key, each in listed.items() if isinstance(each, tuple)})
        return listed

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Convert the files that the store lacks, and cut the rows of all into fragments."""
        pairs = list(zip(files, self._ingested(files, location, partition)))
        schema = self._schema(self._kept_types(pairs, location, partition), location)
        warnings = self._check_columns(pairs, schema, f"{location}{in_partition(partition)}")
        own = "\n".join(["", self.reading, *_types_text(schema), *self._declared_types()])
        sized = [
            SizedFile(
                file, [(piece.rows, piece.bytes) for piece in rows.pieces], own, _places(rows)
            )
            for file, rows in pairs
        ]
        return SourceTable(schema, divide(sized, rule), warnings)

    def _ingested(
        self, files: Sequence[FileRecord], location: str, partition: str | None
    ) -> list[StoredTable]:
        """Return what the store has of files, after those that it lacks are converted."""
        place = hashlib.sha256(self.url_for(partition).encode()).hexdigest()
        record, folder = (self._digest("shown"), place), f"{INGESTED}/{place}"
        kept = borrow(self.bound, *record)
        known = _known(kept) if kept and has_all_rows(self.bound.root, kept) else {}
        listed = {file.url: file for file in self._listed.get(partition, files)}
        keys = [file_identity(file) for file in files]
        results: dict[str, StoredTable | SourceError] = {k: known[k] for k in keys if k in known}
        lacked = [(key, listed[f.url]) for key, f in zip(keys, files) if key not in results]
        small = [each for each in lacked if each[1].size < _SMALL_BYTES]
        lots = [small[n : n + _SMALL_FILES] for n in range(0, len(small), _SMALL_FILES)]
        lots += [[each] for each in lacked if each[1].size >= _SMALL_BYTES]
        on_cluster = bool(lots) and self.connect is not None and self.connect(False)
        reader = self.for_workers()

        def convert(lot: _Lot) -> dict[str, StoredTable | SourceError]:
            per_cpu = _LOTS_A_CPU if len(lot) > 1 else _FILES_A_CPU
            given = IngestedSource._ingest, reader, lot, location, folder
            return call(*given, on_cluster=on_cluster, per_cpu=per_cpu)

        for converted in in_threads(convert, lots):
            results |= converted
        rows = {key: each for key, each in results.items() if isinstance(each, StoredTable)}
        by_types: dict[pa.Schema, list[str]] = {}
        for key, each in rows.items():
            by_types.setdefault(each.schema, []).append(key)
        pieces = tuple(piece for each in rows.values() for piece in each.pieces)
        facts = {schema_record(types): same for types, same in by_types.items()}
        # Again, so that a collection keeps the rows, also those that only earlier runs still read.
        if kept and not kept.files <= {place.name for each in pieces for place in each.places}:
            write_record(self.bound.root, record[0], f"{place}-{secrets.token_hex(8)}", kept)
        write_record(self.bound.root, *record, StoredTable(pa.schema([]), pieces, facts))
        if failed := [each for each in results.values() if isinstance(each, SourceError)]:
            raise SourceError("; ".join(map(str, failed[:5])))
        return [rows[key] for key in keys]

    def _ingest(
        self, lot: _Lot, location: str, folder: str
    ) -> dict[str, StoredTable | SourceError]:
        """Convert files: a large file into several pieces, small files into shared pieces."""
        results: dict[str, StoredTable | SourceError] = {}
        with PieceWriter(self.bound.root, folder) as writer:
            for key, file in lot:
                convert = functools.partial(self._converted, key, file.url, location, writer)
                try:
                    try:
                        results[key] = with_retries(_failpoints.failing("read", file.url, convert))
                    finally:
                        check_unchanged(self, [file], location)
                except SourceError as error:
                    results[key] = error
        return results

    def _converted(self, key: str, url: str, location: str, writer: PieceWriter) -> StoredTable:
        types = pa.schema([])
        written: list[tuple[ParquetRows, int]] = []
        stream = self._stream(url, location)
        for rows in self.convert(stream):
            types = joined(types, self.shown(rows))
            if rows.num_rows:
                written.append((writer.write(rows), rows.nbytes))
        pieces = []
        for _, same in itertools.groupby(written, lambda each: each[0].name):
            places, sizes = zip(*same)
            count = sum(place.stop - place.start for place in places)
            pieces.append(Piece(key, count, sum(sizes), tuple(joined_places(places))))
        return StoredTable(types, tuple(pieces))

    # Types.

    def _declared_types(self) -> list[str]:
        """Return what is read by declared types, which take values that found ones refuse."""
        declared = self.columns or self.types or pa.schema([])
        return [f"declared {each.name}" for each in declared if not pa.types.is_string(each.type)]

    def _kept_types(self, files: _Files, location: str, partition: str | None) -> pa.Schema:
        """Return the types of the source's columns, which the first run finds in all its files."""
        if self.columns is not None:
            return self.columns
        place = self.pipeline, self._digest("types")
        with _one_at_a_time:
            kept = kept_types(self.bound, *place)
            if kept is None:
                pairs = [*files]
                for key, others in self._listed.items():
                    if key != partition:
                        with suppress(SourceError):  # it is the other partition's error
                            pairs += zip(others, self._ingested(others, location, key))
                kept = self._found_types(pairs, location)
                if any(rows.pieces for _, rows in pairs):  # no types are known without a row
                    kept = keep_types(self.bound, *place, kept)
        return kept

    def _found_types(self, files: _Files, location: str) -> pa.Schema:
        """Return the types that all values of some files have; null if they have none."""
        known: dict[str, None] = {}
        for types, url in {rows.schema: file.url for file, rows in files}.items():
            known |= dict.fromkeys(types.names)
            check_column_names(list(known), f"{location}, {url!r}")
        schemas = dict.fromkeys(rows.schema for _, rows in files)
        kinds = {each.name: each.type for each in reduce(joined, schemas, pa.schema([]))}
        if not kinds:
            where = f"{files[0][0].url!r} has no row" if files else f"{self.url!r} has no file"
            raise SourceError(
                f"{location}: {where} to find columns in. Declare them by schema=, or write it"
            )
        declared = self.types or pa.schema([])
        for name in [name for name, kind in kinds.items() if kind == MIXED]:
            having = [file.url for file, rows in files if name in rows.schema.names]
            if name not in declared.names:
                raise SourceError(
                    f"{location}: column {name!r} has values without a common type, in "
                    f"{names(having, 3)}. Declare its type, by types= or schema=, or take files "
                    "out of the source"
                )
            kinds[name] = pa.null()
        return pa.schema(kinds)

    def _schema(self, types: pa.Schema, location: str) -> pa.Schema:
        """Return the columns of the rows: with declared types, and as text without a value."""
        kinds = {f.name: mapped(f.type, _text_if_null) for f in types}
        kinds |= {column.name: column.type for column in self.types or ()}
        if self.include_paths:
            if PATH in map(str.lower, kinds):
                raise SourceError(
                    f"{location}: the files already have a column {PATH!r}. Leave "
                    "include_paths=True out, or rename the column"
                )
            kinds[PATH] = pa.string()
        return pa.schema(kinds)

    def _check_columns(self, files: _Files, schema: pa.Schema, location: str) -> tuple[str, ...]:
        """Refuse a file without any of the columns; warn of declared ones that no file has.

        A column that no file of other partitions has either is an error, in a format of texts.
        Columns that are not read, because the first run's files lacked them, have a warning.
        """
        filled = {rows.schema: file.url for file, rows in files if rows.pieces}
        known = {name: None for _, rows in files for name in rows.schema.names}
        declared = self.types or (self.columns if self.is_text else None) or pa.schema([])
        lower = {name.lower() for name in schema.names}
        for types, url in filled.items():
            read = [name for name in types.names if name.lower() in lower]
            check_column_names([*dict.fromkeys(schema.names + read)], f"{location}, {url!r}")
            if types.names and not read:
                raise SourceError(
                    f"{location}: {url!r} has none of the columns {names(schema.names, 10)}, but "
                    f"{names(types.names, 10)}. Check its header, or take it out of the source"
                )
        new = [name for name in known if name.lower() not in lower and self.columns is None]
        having = [file.url for file, rows in files if not {*new}.isdisjoint(rows.schema.names)]
        warnings = tuple(
            f"{location}: columns that the first run's files lacked are not read: "
            f"{names(new, 10)} in {names(having, 3)}. To read them, declare their types, such as "
            f"types={{{first!r}: 'VARCHAR'}}"
            for first in new[:1]
        )
        unknown = [name for name in declared.names if name not in known]
        if not (unknown and filled):
            return warnings
        if self.is_text:
            for file in reversed(self._all_files(location)):
                with suppress(SourceError):  # it is the other partition's error
                    first = next(self.convert(self._stream(file.url, location)))
                    known |= dict.fromkeys(first.column_names)
                if known.keys() >= {*unknown}:
                    break
            else:
                owner = f"{location}: schema= or types= is wrong: the source"
                require_columns(owner, unknown, known, SourceError)
        return (
            *warnings,
            f"{location}: no file has {names(unknown, 10)} of schema= or types=, so it is null; "
            f"{files[0][0].url!r} has {names(files[0][1].schema.names, 10)}",
        )

    # Reading.

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        """Read rows from the store, and cast them. A value that does not fit is its row's error."""
        wanted = [f for f in schema if not (self.include_paths and f.name == PATH)]
        declared = self.columns or self.types or pa.schema([])
        columns: dict[str, list[pa.Array]] = {column.name: [] for column in wanted}
        errors: dict[int, pa.Field] = {}
        first = 0
        for rows in TableReader(self.bound.root).tables(fragment, [*columns], location):
            for column in wanted:
                if column.name not in rows.column_names:
                    columns[column.name].append(pa.nulls(rows.num_rows, column.type))
                    continue
                cast = functools.partial(self.cast, column, column.name not in declared.names)
                values, misfits = cast_each(rows.column(column.name), column.type, cast)
                columns[column.name] += values
                errors = {first + place: column for place in misfits} | errors
            first += rows.num_rows
        if self.include_paths:
            columns[PATH] = [pa.repeat(path_of(s.url), s.stop - s.start) for s in fragment.spans]
        made = [pa.chunked_array(columns[column.name], column.type) for column in schema]
        table = pa.table(made, schema=schema)
        if not errors:
            return table
        places = ((s.url, n) for s in fragment.spans for n in range(s.start, s.stop))
        faults = [
            ("SourceError", self._misfit(*place, errors[n])) if n in errors else None
            for n, place in enumerate(places)
        ]
        return table.append_column(ROW_ERROR, pa.array(faults, ROW_ERROR_TYPE))

    # Details.

    def _misfit(self, url: str, row: int, column: pa.Field) -> str:
        missing = "name the text in null_values= if it means none, " if self.is_text else ""
        return (
            f"{url!r}, row {row}, counted from 0: column {column.name!r} has a value that is not "
            f"of type {type_name(column.type)}. Fix the file, {missing}or declare a type that "
            f"every value of the column has, for example types={{{column.name!r}: 'VARCHAR'}}"
        )

    def _digest(self, what: str) -> str:
        text = "\n".join([what, self.url, self.reading])
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    def _stream(self, url: str, location: str) -> TextStream:
        return TextStream(url, self.encoding, location, self.options_for(url))


_one_at_a_time = threading.Lock()


def _known(kept: StoredTable) -> dict[str, StoredTable]:
    """Return the files of a record, by their identity."""
    by_file = itertools.groupby(kept.pieces, lambda piece: piece.identity)
    pieces = {key: tuple(same) for key, same in by_file}
    return {
        key: StoredTable(types, pieces.get(key, ()))
        for types, keys in ((read_schema(text), keys) for text, keys in kept.facts.items())
        for key in keys
    }


def _places(file: StoredTable) -> Callable[[int, int], str]:
    """Return a function of a span of a file's rows, which returns where they are."""
    places = [place for piece in file.pieces for place in piece.places]
    return lambda start, stop: dumped_places(start, clipped(places, start, stop))


def _text_if_null(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(kind) else kind


def _types_text(schema: pa.Schema | None) -> list[str]:
    return [f"{column.name}: {column.type}" for column in schema or ()]
