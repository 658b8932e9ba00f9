"""`CsvSource`: CSV files, read as text by Arrow, and cast to the types of their columns."""

from __future__ import annotations

import csv as python_csv
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.csv as arrow_csv

from vane_dagster._arguments import list_of_names
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError
from vane_dagster.sources.ingested_files import (
    Converted,
    IngestedSource,
    SmallFiles,
    declared_types,
    shared_options,
)
from vane_dagster.sources.text_stream import (
    BlockReader,
    RowTooLongError,
    TextStream,
    is_utf_8,
    whole_lines,
    with_compressed,
)
from vane_dagster.sources.text_types import KINDS, TextTypes, joined
from vane_dagster.types.schema import SchemaLike

_DELIMITERS = (",", "\t", ";", "|")
_HEADER_BYTES = 4 << 20
"""Bytes in which the header has to end."""
_WIDTH = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_SEPARATOR = re.compile(rb'"?sep=([,;\t|])"?\r?\n')
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|\Z)")


@dataclass(frozen=True)
class CsvSource(IngestedSource):
    """CSV files that match a URL pattern for each partition; see `csv`."""

    kind: ClassVar[str] = "csv"
    function: ClassVar[str] = "vd.csv"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".csv", ".tsv")
    options: ClassVar[tuple[str, ...]] = (
        *IngestedSource.options,
        *("delimiter", "header", "column_names", "quote", "escape", "null_values", "skip_rows"),
        *("decimal_separator", "date_format", "timestamp_format"),
    )
    delimiter: str | None = None
    header: bool = True
    column_names: tuple[str, ...] | None = None
    quote: str | None = '"'
    escape: str | None = None
    null_values: tuple[str, ...] = ()
    skip_rows: int = 0
    decimal_separator: str = "."
    date_format: str | None = None
    timestamp_format: str | None = None

    @property
    def label(self) -> str:
        return "CSV"

    @property
    def forms(self) -> TextTypes:
        return TextTypes(self.date_format, self.timestamp_format, self.decimal_separator)

    def common_type(self, found: Sequence[Any]) -> pa.DataType:
        return KINDS[reduce(joined, found)]

    def joined(self, one: Any, other: Any) -> Any:
        return joined(one, other)

    def convert(self, stream: TextStream) -> Iterator[Converted]:
        blocks = stream.blocks()
        head = b""
        while len(head) < _HEADER_BYTES and (block := next(blocks, None)) is not None:
            head += block
        names, delimiter, start = self._header(head, stream)
        tail = _Tail(itertools.chain([head[start:]], blocks))
        texts = dict.fromkeys(names, pa.string())
        kinds = dict.fromkeys(names, "null")
        yield pa.schema(texts).empty_table(), kinds
        if tail.is_blank:
            return
        last, rows = "", 0
        try:
            reader = arrow_csv.open_csv(
                pa.PythonFile(BlockReader(tail), mode="r"),
                read_options=arrow_csv.ReadOptions(
                    column_names=names, block_size=stream.window, use_threads=False
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=delimiter,
                    quote_char=self.quote or False,
                    double_quote=self.escape in (None, self.quote),
                    escape_char=self.escape if self.escape not in (None, self.quote) else False,
                    newlines_in_values=bool(self.quote),
                    ignore_empty_lines=len(names) > 1,  # of one column, they are nulls
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=texts,
                    null_values=["", *self.null_values],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            for batch in reader:
                typed = {
                    name: self.forms.typed(column, kinds[name])
                    for name, column in zip(names, batch.columns)
                }
                found = {name: kind for name, (kind, _) in typed.items()}
                yield pa.table({name: column for name, (_, column) in typed.items()}), found
                kinds = {name: joined(kinds[name], found[name]) for name in names}
                rows += batch.num_rows
                if batch.num_rows and batch.num_columns:
                    last = batch.column(-1)[-1].as_py() or ""
        except pa.ArrowInvalid as error:
            raise self._explained(error, delimiter, stream) from error
        if self.quote and self._is_open(last, tail.bytes):
            raise stream.refused(
                "a quote is not closed. Close it, or declare another quote, or quote=None",
                line=self._line(rows, delimiter, stream),
            )

    def _header(self, head: bytes, stream: TextStream) -> tuple[list[str], str, int]:
        """Return the names of the columns, the delimiter, and where the rows begin."""
        start = 0
        for number, line in enumerate(_LINE.finditer(head)):
            if number >= self.skip_rows and line[0].strip(b"\r\n"):
                break
            start = line.end()
        if start == len(head):
            if self.header:
                raise stream.refused(
                    "it is empty, and has no header. Write it again, take it out of the source, "
                    "or declare header=False"
                )
            return list(self._own_names(0)), ",", start
        delimiter = self.delimiter or max(
            _DELIMITERS, key=lambda each: len(self._first(head, start, each)[0])
        )
        if named := _SEPARATOR.match(head, start):  # as Excel writes and reads it
            delimiter, start = self.delimiter or named[1].decode(), named.end()
        fields, end = self._first(head, start, delimiter)
        if not self.header:
            return list(self._own_names(len(fields))), delimiter, start
        if end == len(head) >= _HEADER_BYTES:
            raise stream.refused(
                f"its header does not end in the first {_HEADER_BYTES >> 20} MiB. Check the quotes "
                "and the newlines"
            )
        names = [field.strip() for field in fields]
        lower = [name.lower() for name in names]
        if repeated := [name for name in names if lower.count(name.lower()) > 1]:
            raise stream.refused(
                f"the header has the column {repeated[0]!r} twice (SQL ignores case). Rename one, "
                "or declare skip_rows=1, header=False and column_names=[...]"
            )
        return names, delimiter, end

    def _own_names(self, count: int) -> Sequence[str]:
        """Return the names of the columns of a file without a header."""
        declared = self.columns.names if self.columns is not None else self.column_names
        return declared or [f"column{number}" for number in range(count)]

    def _first(self, text: bytes, start: int, delimiter: str) -> tuple[list[str], int]:
        """Return the fields of the record at a position of a text, and the position after it."""
        end = start

        def lines() -> Iterator[str]:
            nonlocal end
            for line in _LINE.finditer(text, start):
                end = line.end()
                yield line[0].decode("utf-8", "replace")

        try:
            return next(self._records(lines(), delimiter), []), end
        except python_csv.Error:  # a field of more than 128 KiB
            return [], len(text)

    def _records(self, lines: Iterable[str], delimiter: str) -> Any:
        """Return Python's own reader of some lines."""
        quoting: dict[str, Any] = {"quotechar": self.quote}
        if not self.quote:
            quoting = {"quoting": python_csv.QUOTE_NONE}
        escape = self.escape if self.escape != self.quote else None
        return python_csv.reader(lines, delimiter=delimiter, escapechar=escape, **quoting)

    def _line(self, row: int, delimiter: str, stream: TextStream) -> int | None:
        """Return the number of the line at which a row begins; None if Python cannot tell."""
        blocks = whole_lines(stream.blocks(), stream)
        lines = (
            line.decode("utf-8", "replace")
            for block in blocks
            for line in block.splitlines(keepends=True)
        )
        records = self._records(itertools.islice(lines, self.skip_rows, None), delimiter)
        wanted, before = row + self.header, self.skip_rows
        try:
            for record in records:
                wanted -= bool(record)
                if not wanted:
                    return before + 1
                before = self.skip_rows + records.line_num
        except python_csv.Error:
            pass
        return None

    def _is_open(self, last: str, tail: bytes) -> bool:
        """Return whether the last field of a file is in quotes that are not closed.

        Args:
            last: The value of the field.
            tail: The last bytes of the file.
        """
        quote = str(self.quote)
        written = f"{quote}{last.replace(quote, quote * 2)}".encode()
        is_closed = not last.strip("\r\n") and tail.endswith(written * 2)  # `"\n"\n`
        is_at_end = tail.endswith(written[-len(tail) :]) and not last.endswith(quote)
        return is_at_end and not is_closed

    def _explained(self, error: Exception, delimiter: str, stream: TextStream) -> Exception:
        """Return what is wrong by the message of Arrow's reader, without the data in it."""
        text = str(error)
        if "straddling" in text or "block size" in text:
            return RowTooLongError()
        if width := _WIDTH.search(text):
            row, expected, found = map(int, width.groups())
            return stream.refused(
                f"the row has {found} fields, expected {expected}. Fix the row, or check "
                "delimiter=, quote= and skip_rows=",
                line=self._line(row, delimiter, stream),
            )
        if "UTF8" in text:
            line = 1
            for block in whole_lines(stream.blocks(), stream):
                if not is_utf_8(block):
                    return stream.not_utf_8(block, line)
                line += block.count(b"\n")
        return stream.refused("it cannot be parsed as CSV. Check delimiter=, quote= and escape=")


class _Tail:
    """Blocks of text, of which the last bytes are kept.

    Attributes:
        bytes: The last bytes of what was read.
        is_blank: Whether there is nothing but empty lines.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.bytes = b""
        first: list[bytes] = []
        self.is_blank = True
        for block in blocks:
            first.append(block)
            if block.strip(b"\r\n"):
                self.is_blank = False
                break
        self._blocks = itertools.chain(first, blocks)

    def __iter__(self) -> Iterator[bytes]:
        for block in self._blocks:
            before = self.bytes if len(block) < _TAIL else b""
            self.bytes = before + block[-_TAIL:]
            yield block


_TAIL = 1 << 16


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
    skip_rows: int = 0,
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

    The first run that needs a file converts it into Parquet in the store. A column has the type
    that all of its values in the first run's files have: ``007`` makes it text, and so does a date
    that is not in the ISO format, unless `date_format` is given. These types are kept for later
    runs. A row of a later file with a value of another type is quarantined, and columns that later
    files add are not read until `types` names them.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.csv`` and ``*.tsv`` below it, also
            with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``) or a glob, with ``{partition_key}`` or
            ``{partition_key.<dimension>}`` for a partitioned pipeline.
        schema: The columns of the source with their types; others are not read. A column that some
            files lack is null there.
        types: The types of some columns, in place of those that their values have.
        delimiter: The character between fields. By default, in each file, that of ``,``, tab,
            ``;`` and ``|`` which divides the header into the most fields.
        header: Whether the first row of each file has the names of the columns.
        column_names: Names of the columns of files without a header.
        quote: The character around fields; None for none.
        escape: The character before a quote in a quoted field; the quote itself by default.
        null_values: Texts that are null where they are not quoted, beside the empty one. A quoted
            empty text is an empty text in columns of text, and null in others.
        skip_rows: Lines before the header, or before the first row, that are no data.
        encoding: The encoding of the files: any that Python knows.
        decimal_separator: "." or ",".
        date_format: The format of dates as of `strptime`, such as ``%d.%m.%Y``; ISO by default.
        timestamp_format: The format of timestamps; ISO by default.
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
    given = {"quote": quote, "escape": escape, "delimiter": delimiter}
    for name, value in given.items():
        is_one = isinstance(value, str) and len(value.encode()) == 1
        if value is not None and not is_one:
            raise DefinitionError(f"{where}: {name} is {value!r}; expected one ASCII character")
    if decimal_separator not in (".", ","):
        raise DefinitionError(
            f"{where}: decimal_separator is {decimal_separator!r}; expected '.' or ','"
        )
    if type(skip_rows) is not int or skip_rows < 0:
        raise DefinitionError(f"{where}: skip_rows is {skip_rows!r}; expected a number from 0 up")
    return CsvSource(
        **shared_options(where, url, asset, allow_empty, storage_options, encoding, small_files),
        include_paths=include_paths,
        columns=columns,
        types=pinned_types,
        delimiter=delimiter,
        header=header,
        column_names=names,
        quote=quote,
        escape=escape,
        null_values=list_of_names(where, "null_values", null_values) or (),
        skip_rows=skip_rows,
        decimal_separator=decimal_separator,
        date_format=date_format,
        timestamp_format=timestamp_format,
    )
