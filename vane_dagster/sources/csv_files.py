"""`CsvSource`: CSV files, read by DuckDB."""

from __future__ import annotations

import csv as python_csv
import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import duckdb
import pyarrow as pa

from vane_dagster._arguments import list_of_names
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.base import FragmentRule, ReadContext
from vane_dagster.sources.duckdb_stream import as_file
from vane_dagster.sources.exact_types import Formats, InexactError, convert, raw_type
from vane_dagster.sources.record_files import (
    Blocks,
    FileLayout,
    ParseError,
    RecordSource,
    SmallFiles,
    after_bom,
    arrow_type,
    begin,
    declared_types,
    misfit,
    parsed_options,
    pinned,
    sql_code,
    unfit,
)
from vane_dagster.sources.record_scan import (
    Cut,
    QuotedFinder,
    ends_of_lines,
    scan,
    unix_newlines,
)
from vane_dagster.sources.text_stream import MAX_LINE, TextStream, with_compressed
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.schema import SchemaLike
from vane_dagster.types.sql import literal
from vane_dagster.types.sql import quote as quoted_name

_DELIMITERS = (",", "\t", ";", "|")
_LINE_LIMIT = 2_000_000
"""Bytes of a record for which DuckDB's default buffers are large enough."""
_OPEN_QUOTE = "a quote is not closed. Close it, or declare another quote, or quote=None"
_END = "end-of-file-7c1f0b52e6d9"
"""A record after the last one."""
_RECORD = re.compile(r"CSV Error on Line: (\d+)")
_CONVERTED = re.compile(r'Error when converting column "(.*?)"\..*? to \'([^\']+)\'', re.DOTALL)
_WIDTH = re.compile(r"Expected Number of Columns: (\d+) Found: (\d+)")


@dataclass(frozen=True)
class CsvSource(RecordSource):
    """CSV files that match a URL pattern for each partition; see `csv`."""

    kind: ClassVar[str] = "csv"
    function: ClassVar[str] = "vd.csv"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".csv", ".tsv")
    options: ClassVar[tuple[str, ...]] = (
        *RecordSource.options,
        *("delimiter", "header", "column_names", "quote", "escape"),
        *("null_values", "comment", "skip_rows", "null_padding", "decimal_separator"),
        *("date_format", "timestamp_format"),
    )
    delimiter: str | None = None
    header: bool = True
    column_names: tuple[str, ...] | None = None
    quote: str = '"'
    escape: str = '"'
    null_values: tuple[str, ...] = ()
    comment: str = ""
    skip_rows: int = 0
    null_padding: bool = False
    decimal_separator: str = "."
    date_format: str | None = None
    timestamp_format: str | None = None

    @property
    def label(self) -> str:
        return "CSV"

    def inspect(self, stream: TextStream, rule: FragmentRule | None) -> FileLayout:
        head, is_all, rest = begin(stream)
        begins = after_bom(head)
        start = self._first_record(head, begins)
        self._check_newline(head[begins:start], stream)
        if start == len(head) and is_all:
            if self.header:
                raise SourceError(
                    f"{stream.location}: {stream.url!r} is empty, and has no header. Write it "
                    "again, take it out of the source, or declare header=False"
                )
            return FileLayout(self._declared(), (Cut(0, start, 0),), {"names": []})
        whole = head[start:] if is_all else self._whole_records(head[start:], stream)
        sniffed = self._sniffed(whole, stream, head.count(b"\n", 0, start))
        after_header = self._header_end(whole) if self.header else 0
        if self.header:
            self._check_newline(whole[:after_header], stream)
            self._check_header(whole[:after_header], sniffed, stream)
        first = start + after_header
        form: dict[str, Any] = {
            "names": [column["name"] for column in sniffed["Columns"]],
            "delimiter": sniffed["Delimiter"],
        }
        given = {"DateFormat": self.date_format, "TimestampFormat": self.timestamp_format}
        for key, value in given.items():
            if found_format := value or sniffed[key]:
                form[key] = found_format
        found_columns = self._found(sniffed, whole[after_header:], form)
        schema = pinned(found_columns, self.columns, self.types, stream.url, stream.location)
        finder = self.finder(form)

        def blocks() -> Iterable[bytes]:
            return itertools.chain([head[first:]], rest)

        at = Cut(0, first, head.count(b"\n", 0, first))
        if finder is None:
            return self._counted(stream, at, schema, form)
        found = scan(blocks(), finder, rule, at)
        if finder.is_open:
            raise SourceError(
                f"{stream.location}: {stream.url!r}, line {found.end.line + 1}: {_OPEN_QUOTE}"
            )
        if not found.is_regular:
            return self._counted(stream, at, schema, form)
        if finder.has_crlf:
            form["newline"] = "\r\n"
        if found.longest > _LINE_LIMIT:
            form["longest"] = found.longest
        return FileLayout(schema, found.cuts, form)

    def finder(self, form: Mapping[str, Any]) -> QuotedFinder | None:
        is_simple = self.escape in ("", self.quote) and not self.comment and not self.null_padding
        if form.get("irregular") or not is_simple or len(form["delimiter"].encode()) != 1:
            return None
        return QuotedFinder(form["delimiter"], self.quote, len(form["names"]) > 1)

    def parse(
        self,
        blocks: Blocks,
        size: int,
        form: Mapping[str, Any],
        schema: pa.Schema,
        context: ReadContext,
    ) -> pa.Table:
        kinds = {column.name: column.type for column in schema}
        present = [column for column in schema if column.name in form["names"]]
        read = {name: raw_type(kinds.get(name, pa.string())) for name in form["names"]}
        selected = ", ".join(map(self._selected, present)) or "1 AS one"

        if form.get("newline"):
            # DuckDB takes an LF in quotes for the end of a record if records end in CRLF.
            text = list(unix_newlines(blocks(), self.quote))
            blocks, size = lambda: iter(text), sum(map(len, text))
        try:
            with as_file(context.connect(), blocks, size) as url:
                rows = f"read_csv({literal(url)}, {self._arguments(form, read)})"
                query = f"SELECT {selected} FROM {rows}"
                table = context.connect().sql(query).to_arrow_table()
            formats = Formats(form.get("DateFormat"), form.get("TimestampFormat"))
            converted = convert(table, pa.schema(present), context.connect, formats)
            return _completed(converted, schema, table) if len(schema) else table.select([])
        except InexactError as error:
            raise unfit(error) from error
        except duckdb.Error as error:
            raise _explained(error) from error

    def _selected(self, column: pa.Field) -> str:
        """Return the SQL expression of a column, with the decimal separator that Arrow expects."""
        name = quoted_name(column.name)
        is_fraction = pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
        if self.decimal_separator == "," and is_fraction:
            return f"translate({name}, '.,', ',.') AS {name}"
        return name

    def _arguments(self, form: Mapping[str, Any], read: Mapping[str, pa.DataType]) -> str:
        """Return the arguments of `read_csv` for records without a header."""
        columns = ", ".join(
            f"{literal(name)}: {literal(sql_code(kind))}" for name, kind in read.items()
        )
        found = {
            "auto_detect": "false",
            "header": "false",
            "columns": f"{{{columns}}}",
            "delim": literal(form["delimiter"]),
            "compression": "'none'",
            "parallel": "false",
            **self._dialect(),
        }
        if not form.get("irregular"):
            found["new_line"] = literal("\\n")
        if form.get("irregular") or form.get("longest"):
            longest = min(MAX_LINE, form.get("longest") or 16 * _LINE_LIMIT)
            found["max_line_size"] = str(longest + 1)
            found["buffer_size"] = str(2 * longest + 1024)
        return ", ".join(f"{name}={value}" for name, value in found.items())

    def _dialect(self) -> dict[str, str]:
        """Return the arguments that sniffing and reading have in common."""
        found = {
            "quote": literal(self.quote),
            "escape": literal(self.escape),
            "comment": literal(self.comment),
            "skip": "0",
            "strict_mode": "true",
            "null_padding": str(self.null_padding).lower(),
            "decimal_separator": literal(self.decimal_separator),
        }
        if self.null_values:
            found["nullstr"] = f"[{', '.join(map(literal, ('', *self.null_values)))}]"
        return found

    # Planning.

    def _first_record(self, head: bytes, start: int) -> int:
        """Return the position of the header, or of the first row: after lines that are skipped."""
        for _ in range(self.skip_rows):
            start = head.find(b"\n", start) + 1 or len(head)
        comment = self.comment.encode()
        while start < len(head):
            line = head[start : head.find(b"\n", start) + 1 or len(head)]
            if line.strip(b"\r\n") and not (comment and line.startswith(comment)):
                break
            start += len(line)
        return start

    def _check_newline(self, text: bytes, stream: TextStream) -> None:
        """Refuse lines before the rows that end in CR alone: the rows would be taken for them.

        Args:
            text: Lines that are skipped, or the header.
            stream: The file.
        """
        if b"\r" in text.replace(b"\r\n", b"").rstrip(b"\r"):
            raise SourceError(
                f"{stream.location}: {stream.url!r} has lines that end in CR alone; expected LF or "
                "CRLF. Convert the file, for example with tr '\\r' '\\n', or take it out of the "
                "source"
            )

    def _whole_records(self, head: bytes, stream: TextStream) -> bytes:
        """Return the head up to the last newline that is not in quotes."""
        quote = self.quote.encode()
        end = head.rfind(b"\n") + 1
        while end and quote and head.count(quote, 0, end) % 2:
            end = head.rfind(b"\n", 0, end - 1) + 1
        if not end:
            raise SourceError(
                f"{stream.location}: {stream.url!r} has no record that ends in its first "
                f"{len(head) >> 20} MiB. Check the quotes and the newlines"
            )
        return head[:end]

    def _header_end(self, text: bytes) -> int:
        """Return the position after the first record of a text."""
        end, quote = 0, self.quote.encode()
        while True:
            end = text.find(b"\n", end) + 1 or len(text)
            if end == len(text) or not quote or text.count(quote, 0, end) % 2 == 0:
                return end

    def _fields(self, record: bytes, delimiter: str) -> list[str]:
        """Return the fields of a record as texts."""
        quoting = {"quotechar": self.quote} if self.quote else {"quoting": python_csv.QUOTE_NONE}
        text = io.StringIO(record.decode("utf-8", "replace").rstrip("\r\n"), newline="")
        # A delimiter of several characters is DuckDB's alone.
        reader = python_csv.reader(text, delimiter=delimiter[:1], **quoting)
        return [field.strip() for field in next(reader, [])]

    def _check_header(self, header: bytes, sniffed: Mapping[str, Any], stream: TextStream) -> None:
        if len(sniffed["Delimiter"]) > 1:
            return
        found = self._fields(header, sniffed["Delimiter"])
        lower = [name.lower() for name in found]
        fix = "or declare skip_rows=1, header=False and column_names=[...]"
        if repeated := [n for n in found if n and lower.count(n.lower()) > 1]:
            raise SourceError(
                f"{stream.location}: the header of {stream.url!r} has the column {repeated[0]!r} "
                f"twice (SQL ignores case). Rename one, {fix}"
            )
        if len(found) != len(sniffed["Columns"]):
            raise SourceError(
                f"{stream.location}: the header of {stream.url!r} has {len(found)} columns, but "
                f"the rows have {len(sniffed['Columns'])}. Fix the header, {fix}"
            )

    def _sniffed(self, head: bytes, stream: TextStream, lines: int) -> dict[str, Any]:
        """Return what DuckDB finds in a head: the delimiter, and names and types of columns.

        Args:
            head: Whole records, from the header on.
            stream: The file.
            lines: The lines before.

        Raises:
            SourceError: If the records have no common structure.
        """
        text = b"".join(unix_newlines([head], self.quote))
        error = None
        if self.delimiter is None:
            try:
                found = self._sniff(text, None)
            except duckdb.Error:
                found = None
            # DuckDB takes a file whose rows differ in length for one of a single column.
            line = text.partition(b"\n")[0].decode("utf-8", "replace")
            delimiter = next((each for each in _DELIMITERS if each in line), ",")
            if found is not None and len(found["Columns"]) > 1:
                return found
        else:
            delimiter = self.delimiter
        try:
            return self._sniff(text, delimiter)
        except duckdb.Error as failed:
            error = failed
        explained = self._structure_error(text, delimiter) or _explained(error)
        where = ""
        if explained.record is not None:
            before = self._lines_before(text, delimiter, explained.record)
            where = f", line {lines + before + 1}"
        raise SourceError(
            f"{stream.location}: {stream.url!r}{where}: {explained.reason}"
        ) from error

    def _lines_before(self, text: bytes, delimiter: str, record: int) -> int:
        """Return the number of lines before a record, counted from 1."""
        if len(delimiter) != 1 or record < 2:
            return record - 1
        finder = QuotedFinder(delimiter, self.quote, skips_blank=True)
        ends = finder.ends(text, ends_of_lines(text))
        if not finder.is_regular or record - 2 >= ends.size:
            return record - 1
        return text.count(b"\n", 0, int(ends[record - 2]))

    def _sniff(self, head: bytes, delimiter: str | None) -> dict[str, Any]:
        arguments = {
            **self._dialect(),
            "header": str(self.header).lower(),
            "max_line_size": str(max(_LINE_LIMIT, len(head)) + 1),
            "buffer_size": str(2 * max(_LINE_LIMIT, len(head)) + 1024),
        }
        if delimiter is not None:
            arguments["delim"] = literal(delimiter)
        if self.date_format:
            arguments["dateformat"] = literal(self.date_format)
        if self.timestamp_format:
            arguments["timestampformat"] = literal(self.timestamp_format)
        given = self.columns.names if self.columns is not None else self.column_names
        if given and not self.header:
            arguments["names"] = f"[{', '.join(map(literal, given))}]"
        text = ", ".join(f"{name}={value}" for name, value in arguments.items())
        with as_file(shared(), lambda: iter([head]), len(head)) as url:
            found = shared().cursor().execute(f"FROM sniff_csv({literal(url)}, {text})")
            columns = [name for name, *_ in found.description]
            return dict(zip(columns, found.fetchall()[0]))

    def _structure_error(self, head: bytes, delimiter: str) -> ParseError | None:
        """Return the error of the first record that differs from the first one in its columns."""
        columns = self._fields(head[: self._header_end(head)], delimiter)
        form = {"names": [f"c{n}" for n in range(len(columns))], "delimiter": delimiter}
        if finder := self.finder(form):
            found = scan([head], finder, None, Cut(0, 0, 0))
            if finder.is_open:
                return ParseError(_OPEN_QUOTE, found.end.row + 1)
        kinds = dict.fromkeys(form["names"], pa.string())
        try:
            with as_file(shared(), lambda: iter([head]), len(head)) as url:
                table = f"read_csv({literal(url)}, {self._arguments(form, kinds)})"
                shared().cursor().sql(f"FROM {table}").to_arrow_table()
        except duckdb.Error as error:
            return _explained(error)
        return None

    def _found(self, sniffed: Mapping[str, Any], rows: bytes, form: Mapping[str, Any]) -> pa.Schema:
        """Return the columns that were sniffed; those without any value have the null type."""
        formats = Formats(timestamp=self.timestamp_format)
        kinds = [(c["name"], arrow_type(c["type"])) for c in sniffed["Columns"]]
        schema = pa.schema([(name, formats.inferred(kind)) for name, kind in kinds])
        first = self._fields(rows[: self._header_end(rows)], sniffed["Delimiter"]) if rows else []
        nulls = ("", *self.null_values)
        maybe = dict(itertools.zip_longest(schema.names, first[: len(schema)], fillvalue=""))
        texts = [f.name for f in schema if pa.types.is_string(f.type) and maybe[f.name] in nulls]
        if not texts:
            return schema
        counts = ", ".join(f"count({quoted_name(name)})" for name in texts)
        text = b"".join(unix_newlines([rows], self.quote))
        arguments = self._arguments(form, dict.fromkeys(schema.names, pa.string()))
        try:
            with as_file(shared(), lambda: iter([text]), len(text)) as url:
                query = f"SELECT {counts} FROM read_csv({literal(url)}, {arguments})"
                found = shared().cursor().execute(query).fetchall()[0]
        except duckdb.Error:  # the read reports it, with the line
            return schema
        empty = {name for name, count in zip(texts, found) if not count}
        return pa.schema([(f.name, pa.null() if f.name in empty else f.type) for f in schema])

    def _declared(self) -> pa.Schema:
        """Return the declared columns, for an empty file."""
        if self.columns is not None:
            return self.columns
        return pa.schema([(name, pa.null()) for name in self.column_names or ()])

    def _counted(
        self, stream: TextStream, start: Cut, schema: pa.Schema, form: Mapping[str, Any]
    ) -> FileLayout:
        """Count the records of a file whose structure only DuckDB knows.

        DuckDB drops a last record whose quote is not closed. A record that is added to the text is
        dropped with it, which shows that.
        """
        form = {**form, "irregular": True}
        size, first, last = start.byte, b"", b""
        for block in stream.blocks(start.byte):
            size, first, last = size + len(block), first or block, block
        newline = next((each for each in (b"\r\n", b"\n", b"\r") if each in first), b"\n")
        ends = b"" if last.endswith((b"\n", b"\r")) else newline
        ends += _END.encode() + form["delimiter"].encode() * (len(form["names"]) - 1)
        read = dict.fromkeys(form["names"], pa.string())
        column = quoted_name(form["names"][0])
        counts = f"count(*), count(*) FILTER (WHERE {column} = {literal(_END)})"
        query = f"SELECT {counts} FROM read_csv(%s, {self._arguments(form, read)})"

        def blocks() -> Iterator[bytes]:
            return itertools.chain(stream.blocks(start.byte), [ends])

        try:
            with as_file(shared(), blocks, size - start.byte + len(ends)) as url:
                ((count, ended),) = shared().cursor().execute(query % literal(url)).fetchall()
        except duckdb.Error as error:
            explained = _explained(error)
            where = "" if explained.record is None else f", line {start.line + explained.record}"
            raise SourceError(
                f"{stream.location}: {stream.url!r}{where}: {explained.reason}"
            ) from error
        if ended != 1:
            raise SourceError(f"{stream.location}: {stream.url!r}: {_OPEN_QUOTE}")
        count -= 1
        cuts = (start, Cut(count, size, start.line + count)) if count else (start,)
        return FileLayout(schema, cuts, form)


@known_keywords("vd.csv")
def csv(
    url: str | os.PathLike[str],
    *,
    schema: SchemaLike | None = None,
    types: SchemaLike | None = None,
    delimiter: str | None = None,
    header: bool = True,
    column_names: Sequence[str] | None = None,
    quote: str | None = '"',
    escape: str | None = None,
    null_values: Sequence[str] = (),
    comment: str | None = None,
    skip_rows: int = 0,
    null_padding: bool = False,
    encoding: str = "utf-8",
    decimal_separator: str = ".",
    date_format: str | None = None,
    timestamp_format: str | None = None,
    include_paths: bool = False,
    small_files: SmallFiles = "group",
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> CsvSource:
    """Declare CSV files as a pipeline's source.

    DuckDB finds the delimiter and the types of the columns in the head of each file (4 MiB).
    A later value that does not fit its column's type is an error with file and line; nothing is
    rounded or truncated.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.csv`` and ``*.tsv`` below it, also
            with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``) or a glob, with ``{partition_key}`` or
            ``{partition_key.<dimension>}`` for a partitioned pipeline.
        schema: The columns of the source with their types; others are not read. A column that some
            files lack is null there.
        types: The types of some columns, in place of those that DuckDB finds.
        delimiter: The text between fields; found in each file by default.
        header: Whether the first record of each file has the names of the columns.
        column_names: Names of the columns of files without a header.
        quote: The character around fields; None for none.
        escape: The character before a quote in a quoted field; the quote itself by default.
        null_values: Texts that are null, beside the empty one.
        comment: The character that begins a comment: outside of quotes, the rest of the line is not
            read.
        skip_rows: Lines before the header, or before the first row, that are no data.
        null_padding: Whether columns that are missing at the end of a row are null; an error by
            default.
        encoding: The encoding of the files: any that Python knows.
        decimal_separator: "." or ",".
        date_format: The format of dates, as ``%d.%m.%Y``; found in each file by default.
        timestamp_format: The format of timestamps; found in each file by default.
        include_paths: Whether there is a column `path` with the file's URL.
        small_files: "group" combines small files in a fragment, "separate" makes at least one
            fragment of each file; see `parquet`.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether files without any rows are accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is wrong.
        SchemaError: If a type is unknown.
    """
    where = "vd.csv"
    columns, pinned_types = declared_types(where, schema, types)
    names = list_of_names(where, "column_names", column_names)
    if names is not None and (header or columns is not None):
        raise DefinitionError(
            f"{where}: column_names are for files without a header whose types are found in the "
            "files; declare header=False, or schema= alone"
        )
    given: dict[str, Any] = {
        "quote": quote or "",
        "escape": (quote if escape is None else escape) or "",
    }
    given |= {"comment": comment or ""}
    for name, value in given.items():
        if not isinstance(value, str) or len(value.encode()) > 1:
            raise DefinitionError(f"{where}: {name} is {value!r}; expected one ASCII character")
    if delimiter is not None and (not isinstance(delimiter, str) or not 1 <= len(delimiter) <= 4):
        raise DefinitionError(f"{where}: delimiter is {delimiter!r}; expected 1 to 4 characters")
    if decimal_separator not in (".", ","):
        raise DefinitionError(
            f"{where}: decimal_separator is {decimal_separator!r}; expected '.' or ','"
        )
    if type(skip_rows) is not int or skip_rows < 0:
        raise DefinitionError(f"{where}: skip_rows is {skip_rows!r}; expected a number from 0 up")
    return CsvSource(
        **parsed_options(where, url, asset, allow_empty, storage_options, encoding, small_files),
        include_paths=include_paths,
        columns=columns,
        types=pinned_types,
        delimiter=delimiter,
        header=header,
        column_names=names,
        null_values=list_of_names(where, "null_values", null_values) or (),
        skip_rows=skip_rows,
        null_padding=null_padding,
        decimal_separator=decimal_separator,
        date_format=date_format,
        timestamp_format=timestamp_format,
        **given,
    )


def _completed(table: pa.Table, schema: pa.Schema, rows: pa.Table) -> pa.Table:
    """Return the columns of a schema; those that the file lacks are null."""
    found = [
        table.column(f.name) if f.name in table.column_names else pa.nulls(rows.num_rows, f.type)
        for f in schema
    ]
    return pa.table(found, schema=schema)


def _explained(error: duckdb.Error) -> ParseError:
    """Return what is wrong by DuckDB's message, without the data in it."""
    text = str(error)
    found = _RECORD.search(text)
    record = int(found.group(1)) if found else None
    if converted := _CONVERTED.search(text):
        made = misfit(converted.group(1), converted.group(2))
        return ParseError(made.reason, record)
    if width := _WIDTH.search(text):
        reason = (
            f"the row has {width.group(2)} fields, expected {width.group(1)}. Fix the row, or "
            "check delimiter= and quote=; null_padding=True makes missing fields null"
        )
    elif "Invalid unicode" in text:
        reason = 'it is not valid UTF-8. Set encoding= to the encoding of the file, as "latin-1"'
    elif "unterminated quote" in text:
        reason = _OPEN_QUOTE
    elif "state machine" in text:
        reason = (
            "quotes or newlines are mixed. Fix the file, or check quote=, escape= and delimiter="
        )
    elif "sniffing" in text:
        reason = (
            "its rows have no common structure. Check delimiter=, escape= and skip_rows=, and that "
            "each quote is closed"
        )
    elif "Maximum line size" in text:
        reason = "a row is too long. Check the quotes and newlines"
    else:
        reason = (
            f"{type(error).__name__} of DuckDB. Check delimiter=, quote=, escape= and skip_rows="
        )
    return ParseError(reason, record)
