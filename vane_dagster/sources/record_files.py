"""`RecordSource`: files of text with a record a line, or in quotes more than one line.

Planning reads each new file once. `inspect` finds its columns in the head, and counts and cuts its
records (`record_scan`). The result, a `FileLayout`, is kept in the store for later plans.
A span's detail has the range of bytes and what `inspect` found of the format, so that a worker
reads its range alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._arguments import one_of
from vane_dagster.errors import DefinitionError, SchemaError, SourceError, names
from vane_dagster.sources.base import (
    FragmentRule,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
)
from vane_dagster.sources.exact_types import InexactError
from vane_dagster.sources.file import path_of
from vane_dagster.sources.file_source import FileSource, file_arguments
from vane_dagster.sources.files import file_identity
from vane_dagster.sources.grouping import FileSize, group, is_small
from vane_dagster.sources.record_scan import Cut, Positions, RecordFinder, records
from vane_dagster.sources.schemas import CommonColumns, FileColumns, common_columns
from vane_dagster.sources.text_stream import BOM, TextStream, parse_encoding
from vane_dagster.storage.filesystem import IO_THREADS, Location
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.source_indexes import SourceIndex
from vane_dagster.storage.transient_errors import with_retries
from vane_dagster.types.schema import (
    SchemaLike,
    check_distinct,
    parse_schema,
    read_schema,
    schema_record,
    seen_by_sql,
    sql_name,
    sql_type,
    type_name,
)

if TYPE_CHECKING:
    from vane_dagster.storage.store import Store

SmallFiles = Literal["separate", "group"]

HEAD = 4 << 20
"""Bytes of the head of a file, in which the columns are found."""
_VERSION = 1
"""Part of the identity of fragments; another number reads all files again."""
_PATH = "path"
_UNUSED = FileColumns(pa.schema([]))
"""Stands for a file without columns, which has no rows."""


@dataclass(frozen=True)
class FileLayout:
    """What planning found in a file.

    Attributes:
        schema: The file's columns.
        cuts: The boundaries of its fragments; see `Records`.
        form: What was found of the format, as JSON values; a read needs it.
    """

    schema: pa.Schema
    cuts: tuple[Cut, ...]
    form: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """The rows of the file."""
        return self.cuts[-1].row

    @property
    def size(self) -> int:
        """The bytes of its rows as text."""
        return self.cuts[-1].byte - self.cuts[0].byte

    def to_json(self) -> Any:
        """Return the layout as JSON values."""
        cuts = [[cut.row, cut.byte, cut.line] for cut in self.cuts]
        return {"schema": schema_record(self.schema), "cuts": cuts, "form": dict(self.form)}

    @classmethod
    def from_json(cls, record: Any) -> FileLayout:
        """Return the layout that `to_json` made values of."""
        return cls(
            read_schema(record["schema"]), tuple(Cut(*c) for c in record["cuts"]), record["form"]
        )


@dataclass(frozen=True)
class Span:
    """A range of a file's text that a worker reads.

    Attributes:
        url: The file.
        rows: The number of its records.
        first_row: The rows before it.
        start: Its first byte.
        stop: The byte after its last.
        line: The lines before it.
        form: What planning found of the format.
    """

    url: str
    rows: int
    first_row: int
    start: int
    stop: int
    line: int
    form: Mapping[str, Any]

    @property
    def detail(self) -> str:
        """The span's text in manifests."""
        rows = [self.first_row, self.first_row + self.rows]
        found = {"rows": rows, "bytes": [self.start, self.stop], "line": self.line, **self.form}
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, span: FileSpan) -> Span:
        """Return the range of a span with a detail."""
        form = json.loads(span.detail)
        (first, last), (start, stop), line = form.pop("rows"), form.pop("bytes"), form.pop("line")
        return cls(span.url, last - first, first, start, stop, line, form)

    def slice(self, table: pa.Table, span: FileSpan) -> pa.Table:
        """Return the rows of a span that is this range or a part of it.

        Args:
            table: The rows of this range.
            span: The span.
        """
        return table.slice(span.start - self.first_row, span.stop - span.start)


class ParseError(Exception):
    """Text that cannot be parsed.

    Attributes:
        reason: What is wrong, without data.
        record: The number of the record, counted from 1, if the parser knows it.
    """

    def __init__(self, reason: str, record: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.record = reason, record


Blocks = Callable[[], Iterator[bytes]]


@dataclass(frozen=True)
class RecordSource(FileSource):
    """Files of text that match a URL pattern for each partition.

    A subclass defines `inspect`, `parse` and `finder`, and sets `options` to the names of its
    attributes that change the rows.

    Attributes:
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
    """

    options: ClassVar[tuple[str, ...]] = ("columns", "types", "encoding", "include_paths")
    columns: pa.Schema | None = None
    types: pa.Schema | None = None
    encoding: str = "utf-8"
    include_paths: bool = False
    small_files: SmallFiles = "group"
    root: Location | None = field(default=None, init=False, repr=False, compare=False)

    # What a format defines.

    @abstractmethod
    def inspect(self, stream: TextStream, rule: FragmentRule | None) -> FileLayout:
        """Find a file's columns and records.

        Args:
            stream: The file.
            rule: The maximum size of a fragment; None if the file cannot be cut.

        Raises:
            SourceError: If it cannot be read or parsed.
        """

    @abstractmethod
    def parse(
        self,
        blocks: Blocks,
        size: int,
        form: Mapping[str, Any],
        schema: pa.Schema,
        context: ReadContext,
    ) -> pa.Table:
        """Parse whole records.

        Args:
            blocks: Starts the text anew.
            size: Its bytes.
            form: What `inspect` found of the format.
            schema: The columns to read.
            context: Location and DuckDB connection.

        Raises:
            ParseError: If they cannot be parsed.
        """

    @abstractmethod
    def finder(self, form: Mapping[str, Any]) -> RecordFinder | None:
        """Return the finder of the records of a format; None if they cannot be found apart.

        Args:
            form: What `inspect` found of the format.
        """

    # Declaration.

    def describe(self) -> str:
        return f"{self.label} files at {self.url}"

    @property
    def splitting(self) -> str:
        grouped = "group small files, 1" if self.small_files == "group" else ""
        return f"{self.reading}{grouped}"

    @property
    def reading(self) -> str:
        """The text of everything in the declaration that changes the rows of given files."""
        values = {name: _plain(getattr(self, name)) for name in self.options}
        return json.dumps([self.kind, _VERSION, values], sort_keys=True)

    # Planning.

    def bind(self, store: Store) -> Source:
        bound = replace(self)
        object.__setattr__(bound, "root", store.root)
        return bound

    def for_workers(self) -> SourceReader:
        return replace(self)  # without the store

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        layouts = self._layouts(files, rule, location, partition)
        common = self._common(files, layouts, location)
        fragments: list[FragmentRecord] = []
        small: dict[str, tuple[FileRecord, FileLayout, str]] = {}
        for file, layout, columns in zip(files, layouts, common.files):
            extra = self._extra(layout, columns)
            size = FileSize(file.url, layout.rows, layout.size)
            is_grouped = self.small_files == "group" and is_small(size, rule.rows, rule.bytes)
            if layout.rows and is_grouped:
                small[file.url] = (file, layout, extra)
                continue
            for one, end in itertools.pairwise(layout.cuts):
                span, detail = (file, one.row, end.row), _span(file, layout, one, end).detail
                fragments.append(fragment_record([span], end.byte - one.byte, extra, [detail]))
        sizes = [FileSize(url, found.rows, found.size) for url, (_, found, _) in small.items()]
        for grouped in group(sizes, rule.rows, rule.bytes):
            members = [small[each.url] for each in grouped]
            spans = [(file, 0, layout.rows) for file, layout, _ in members]
            details = [_whole(file, layout).detail for file, layout, _ in members]
            extra = "".join(extra for _, _, extra in members)
            held = sum(size.bytes for size in grouped)
            fragments.append(fragment_record(spans, held, extra, details))
        fragments.sort(key=lambda fragment: fragment.url)  # stable: rows of a file stay in order
        return SourceTable(common.schema, tuple(fragments), common.partial)

    def _common(
        self, files: Sequence[FileRecord], layouts: Sequence[FileLayout], location: str
    ) -> CommonColumns:
        found = [(file.url, layout.schema) for file, layout in zip(files, layouts)]
        with_columns = [pair for pair in found if len(pair[1])]
        if not with_columns and self.columns is None:
            raise SourceError(
                f"{location}: {files[0].url!r} has no row to find columns in. Declare them by "
                "schema=, or write the file again"
            )
        declared = self.columns or self.types or pa.schema([])
        known = {name for _, schema in with_columns for name in schema.names}
        has_rows = any(layout.rows for layout in layouts)
        if has_rows and (unknown := [name for name in declared.names if name not in known]):
            raise SourceError(
                f"{location}: no file has the column {unknown[0]!r} of schema= or types=; "
                f"{files[0].url!r} has {names(self._names(layouts[0]), 10)}"
            )
        try:
            common = common_columns(with_columns or [(files[0].url, self.columns)], location)
        except SourceError as error:
            fix = " Or declare the type of the column for all files, by types= or schema="
            raise SourceError(f"{error}.{fix}") from error
        conversions = dict(zip([url for url, _ in with_columns], common.files))
        common = replace(common, files=tuple(conversions.get(f.url, _UNUSED) for f in files))
        order = self.columns.names if self.columns is not None else common.schema.names
        fields = [common.schema.field(name) for name in order]
        kinds = {f.name: pa.string() if pa.types.is_null(f.type) else f.type for f in fields}
        if self.include_paths:
            if _PATH in (name.lower() for name in kinds):
                raise SourceError(
                    f"{location}: {files[0].url!r} has a column {_PATH!r} of its own; leave "
                    "include_paths=True out, or rename the column"
                )
            kinds[_PATH] = pa.string()
        return replace(common, schema=pa.schema(kinds))

    def _names(self, layout: FileLayout) -> Sequence[str]:
        """Return the names of all columns in a file."""
        found: Sequence[str] = layout.form.get("names", layout.schema.names)
        return found

    def _extra(self, layout: FileLayout, columns: FileColumns) -> str:
        """Return what the rows of a file depend on beside its bytes."""
        kinds = [f"{field.name}: {field.type}" for field in layout.schema]
        form = json.dumps(layout.form, sort_keys=True)
        return "\n".join(["", self.reading, form, *kinds]) + columns.extra

    def _layouts(
        self, files: Sequence[FileRecord], rule: FragmentRule, location: str, partition: str | None
    ) -> list[FileLayout]:
        index = self._index(rule, partition)
        known = index.entries() if index else {}
        keys = [file_identity(file) for file in files]

        def layout(file: FileRecord, key: str) -> FileLayout | SourceError:
            try:
                if key in known:
                    return FileLayout.from_json(known[key])
                return self._inspected(file.url, rule, location)
            except SourceError as error:
                return error

        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            found = list(threads.map(layout, files, keys))
        if failed := [each for each in found if isinstance(each, SourceError)]:
            raise _together(failed, location)
        layouts = [each for each in found if isinstance(each, FileLayout)]
        if index:
            index.keep({key: layout.to_json() for key, layout in zip(keys, layouts)})
        return layouts

    def _index(self, rule: FragmentRule, partition: str | None) -> SourceIndex | None:
        if self.root is None:
            return None
        text = "\n".join([self.url_for(partition), self.reading, str(rule.rows), str(rule.bytes)])
        return SourceIndex(self.root, hashlib.blake2b(text.encode(), digest_size=20).hexdigest())

    def _inspected(self, url: str, rule: FragmentRule | None, location: str) -> FileLayout:
        stream = TextStream(url, self.encoding, location, self.options_for(url))
        cut_by = rule if stream.is_seekable else None

        def inspect() -> FileLayout:
            try:
                return self.inspect(stream, cut_by)
            except ValueError as error:  # a line that is too long
                raise SourceError(
                    f"{location}: {url!r} cannot be read as {self.label}: {error}. Write it again, "
                    "or take it out of the source"
                ) from error

        return with_retries(_failpoints.failing("read", url, inspect))

    # Reading.

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Parse the text of a fragment; files of one format together."""
        pairs = [(span, self._resolved(span, context)) for span in fragment.spans]
        tables = []
        for _, same in itertools.groupby(pairs, lambda pair: pair[1].form):
            group_pairs = list(same)
            table, at = self._read([found for _, found in group_pairs], schema, context), 0
            for span, found in group_pairs:
                tables.append(found.slice(table.slice(at, found.rows), span))
                at += found.rows
        return pa.concat_tables(tables)

    def _resolved(self, span: FileSpan, context: ReadContext) -> Span:
        """Return the range of a span; all of the file, as it is now, if the span has no detail."""
        if span.detail:
            return Span.parse(span)
        layout = self._inspected(span.url, None, context.location)
        return _whole(FileRecord(span.url, 0, ""), layout)

    def _read(self, spans: Sequence[Span], schema: pa.Schema, context: ReadContext) -> pa.Table:
        parsed = [f for f in schema if not (self.include_paths and f.name == _PATH)]
        wanted = pa.schema(parsed)
        rows = sum(span.rows for span in spans)
        if not rows:
            return schema.empty_table()
        blocks, size = self._joined(spans, context)
        try:
            table = with_retries(
                _failpoints.failing(
                    "read",
                    spans[0].url,
                    lambda: self.parse(blocks, size, spans[0].form, wanted, context),
                )
            )
        except ParseError as error:
            for span in spans:
                self._check(span, wanted, context)
            raise self._refused(spans[0], None, error, context) from error
        if table.num_rows != rows and len(spans) > 1:
            for span in spans:
                table = self._read([span], schema, context)
        if table.num_rows != rows:
            raise SourceError(
                f"{context.location}: {spans[-1].url!r} has {table.num_rows} rows, but {rows} "
                "records were counted. Check the delimiter and the quotes, or write it again"
            )
        if len(wanted) == len(schema):
            return table
        paths = [pa.repeat(pa.scalar(path_of(span.url)), span.rows) for span in spans]
        return table.append_column(_PATH, pa.chunked_array(paths)).select(schema.names)

    def _joined(self, spans: Sequence[Span], context: ReadContext) -> tuple[Blocks, int]:
        """Return the text of spans, one after the other, and its size."""
        if len(spans) == 1:
            (span,) = spans
            return lambda: self._blocks(span, context), span.stop - span.start
        newline = str(spans[0].form.get("newline") or "\n").encode()
        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            texts = list(threads.map(lambda s: b"".join(self._blocks(s, context)), spans))
        ended = [text if text.endswith(b"\n") else text + newline for text in texts]
        return lambda: iter(ended), sum(map(len, ended))

    def _blocks(self, span: Span, context: ReadContext) -> Iterator[bytes]:
        options = self.options_for(span.url)
        stream = TextStream(span.url, self.encoding, context.location, options)
        return stream.blocks(span.start, span.stop)

    # Errors.

    def _check(self, span: Span, schema: pa.Schema, context: ReadContext) -> None:
        """Raise the error of the first record of a span that cannot be parsed, if there is one."""

        def failure(text: bytes) -> ParseError | None:
            try:
                self.parse(lambda: iter([text]), len(text), span.form, schema, context)
            except ParseError as error:
                return error
            return None

        finder = self.finder(span.form)
        if finder is None:
            try:
                blocks, size = self._joined([span], context)
                self.parse(blocks, size, span.form, schema, context)
            except ParseError as error:
                line = None if error.record is None else span.line + error.record
                raise self._refused(span, line, error, context) from error
            return
        before = span.line
        for piece, ends in records(self._blocks(span, context), finder):
            if found := failure(piece):
                start, stop, found = _first_failing(piece, ends, failure, found)
                start += len(piece[start:stop]) - len(piece[start:stop].lstrip(b"\r\n"))
                line = before + piece.count(b"\n", 0, start) + 1
                raise self._refused(span, line, found, context) from found
            before += piece.count(b"\n")

    def _refused(
        self, span: Span, line: int | None, error: ParseError, context: ReadContext
    ) -> SourceError:
        where = "" if line is None else f", line {line}"
        return SourceError(f"{context.location}: {span.url!r}{where}: {error.reason}")


def _first_failing(
    piece: bytes,
    ends: Positions,
    failure: Callable[[bytes], ParseError | None],
    error: ParseError,
) -> tuple[int, int, ParseError]:
    """Return the range of the first record that cannot be parsed, and its error.

    Args:
        piece: The text of some records.
        ends: The positions after them.
        failure: Parses records, and returns the error.
        error: The error of all of them.
    """
    starts = np.concatenate(([0], ends[:-1]))
    good, bad = 0, len(ends)
    while bad - good > 1:
        middle = (good + bad) // 2
        found = failure(piece[starts[good] : ends[middle - 1]])
        if found is None:
            good = middle
        else:
            bad, error = middle, found
    start, stop = int(starts[good]), int(ends[bad - 1])
    return start, stop, failure(piece[start:stop]) or error


def unfit(error: InexactError) -> ParseError:
    """Return the error for a value that does not fit its column's type."""
    return misfit(error.column, type_name(error.kind))


def misfit(column: str, kind: str) -> ParseError:
    """Return the error for a value that does not fit its column's type.

    Args:
        column: The column.
        kind: Its type.
    """
    return ParseError(
        f"column {column!r} has a value that {kind}, the type of the column, cannot hold exactly. "
        "Fix the file, or declare a type that can hold every value of the column, for example "
        f"types={{{column!r}: 'VARCHAR'}}"
    )


def begin(stream: TextStream) -> tuple[bytes, bool, Iterator[bytes]]:
    """Read the head of a file.

    Returns:
        The head, whether it is all of the file, and the blocks after it.
    """
    blocks = stream.blocks()
    head = b""
    for block in blocks:
        head += block
        if len(head) >= HEAD:
            return head, False, blocks
    return head, True, iter(())


def after_bom(head: bytes) -> int:
    """Return the position after a byte order mark, if a text begins with one."""
    return len(BOM) if head.startswith(BOM) else 0


def parsed_options(
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
        The attributes of a `RecordSource`.

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
    where: str, schema: SchemaLike | None, types: SchemaLike | None
) -> tuple[pa.Schema | None, pa.Schema | None]:
    """Validate the columns and types that a declaration pins.

    Args:
        where: The function, for messages.
        schema: All columns, with their types.
        types: The types of some columns.

    Raises:
        DefinitionError: If both are given.
        SchemaError: If a type is unknown, or text cannot have it.
    """
    if schema is not None and types is not None:
        raise DefinitionError(
            f"{where}: schema and types are both given; schema names all columns, types those "
            "whose type is not to be found in the files. Give one"
        )
    parsed = [None if each is None else parse_schema(each, where) for each in (schema, types)]
    for pinned in parsed:
        for column in pinned or ():
            if sql_name(column.type) is None or seen_by_sql(column.type) != column.type:
                raise SchemaError(
                    f"{where}: column {column.name!r} is {column.type}, which no text is read as; "
                    "declare a SQL type, and convert it in the pipeline"
                )
    return parsed[0], parsed[1]


def pinned(
    found: pa.Schema, schema: pa.Schema | None, types: pa.Schema | None, url: str, location: str
) -> pa.Schema:
    """Return a file's columns with the declared types.

    Args:
        found: The columns in the file.
        schema: The columns of the source, if they are declared. Others are left out.
        types: The types of some columns.
        url: The file.
        location: The pipeline, for messages.

    Raises:
        SchemaError: If SQL does not distinguish two names.
    """
    check_distinct(found.names, f"{location}, {url!r}")
    if schema is not None:
        return pa.schema([column for column in schema if column.name in found.names])
    kinds = {column.name: column.type for column in found}
    kinds |= {c.name: c.type for c in types or () if c.name in kinds}
    return pa.schema(kinds)


def sql_code(kind: pa.DataType) -> str:
    """Return the SQL type string of a declared or found type."""
    name = sql_name(kind)
    assert name is not None, "declared and found types are SQL's"
    return name


def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type of a type that DuckDB found in text; a string if Arrow has none."""
    try:
        kind = sql_type(name)
    except SchemaError:
        return pa.string()
    return kind if pa.types.is_null(kind) or sql_name(kind) is not None else pa.string()


def _plain(value: Any) -> Any:
    """Return an option as JSON values."""
    if isinstance(value, pa.Schema):
        return [[column.name, str(column.type)] for column in value]
    return value


def _span(file: FileRecord, layout: FileLayout, one: Cut, end: Cut) -> Span:
    rows = end.row - one.row
    return Span(file.url, rows, one.row, one.byte, end.byte, one.line, layout.form)


def _whole(file: FileRecord, layout: FileLayout) -> Span:
    return _span(file, layout, layout.cuts[0], layout.cuts[-1])


def _together(errors: Sequence[SourceError], location: str) -> SourceError:
    """Return one error for all files that cannot be read."""
    if len(errors) == 1:
        return errors[0]
    texts = [str(error).removeprefix(f"{location}: ") for error in errors]
    more = f"; and {len(texts) - 5} more files" if len(texts) > 5 else ""
    return SourceError(f"{location}: {len(texts)} files: {'; '.join(texts[:5])}{more}")
