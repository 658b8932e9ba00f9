"""`CsvSource`: CSV files, read as text by Arrow, and cast to the types of their columns."""

from __future__ import annotations

import csv as python_csv
import io
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.csv as arrow_csv

from vane_dagster._arguments import list_of_names
from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError
from vane_dagster.sources.column_types import shown
from vane_dagster.sources.ingested_files import IngestedSource
from vane_dagster.sources.text_stream import (
    BLOCK,
    BlockReader,
    TextStream,
    whole_lines,
    with_compressed,
)
from vane_dagster.sources.text_types import typed
from vane_dagster.types.schema import SchemaLike

_UNQUOTED = python_csv.QUOTE_NONE
_DELIMITERS = (",", "\t", ";", "|")
_HEADER_BYTES = 4 << 20
"""Bytes in which the header has to end."""
_LAST = "\N{SYMBOL FOR END OF TRANSMISSION}"
"""The first field of a row that is added to each file: a quote that is not closed swallows it."""
_ANY_SIZE = 2**31 - 1
_WIDTH = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")


@dataclass(frozen=True)
class CsvSource(IngestedSource):
    """CSV files that match a URL pattern for each partition; see `csv`."""

    kind: ClassVar[str] = "csv"
    label: ClassVar[str | None] = "CSV"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".csv", ".tsv")
    delimiter: str | None = None
    header: bool | tuple[str, ...] = True
    quote: str | None = '"'
    escape: str | None = None
    null_values: tuple[str, ...] = ()
    skip_rows: int = 0

    def shown(self, rows: pa.Table) -> pa.Schema:
        columns = (typed(values.combine_chunks()) for values in rows.columns)
        return pa.schema(list(map(shown, rows.column_names, columns)))

    def convert(self, stream: TextStream) -> Iterator[pa.Table]:
        blocks = stream.blocks()
        head = next(blocks, b"")
        names, delimiter, start = self._header(head[:_HEADER_BYTES], stream)
        rows = pa.schema(dict.fromkeys(names, pa.string())).empty_table()
        yield rows
        if not names:
            return
        lines = whole_lines(itertools.chain([head[start:]], blocks), stream)
        last = (_LAST + delimiter * (len(names) - 1)).encode()
        count, ending = 0, []
        try:
            reader = arrow_csv.open_csv(
                pa.PythonFile(BlockReader(lines, last), mode="r"),
                read_options=arrow_csv.ReadOptions(
                    column_names=names, use_threads=False, block_size=_ANY_SIZE
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=delimiter,
                    quote_char=self.quote or False,
                    double_quote=not self.escape,
                    escape_char=self.escape or False,
                    newlines_in_values=bool(self.quote),
                    ignore_empty_lines=len(names) > 1,  # of one column, they are nulls
                ),
                convert_options=arrow_csv.ConvertOptions(
                    check_utf8=False,
                    column_types=rows.schema,
                    null_values=["", *self.null_values],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            batches = itertools.chain(filter(len, reader), [None])
            for batch, following in itertools.pairwise(batches):
                count += batch.num_rows
                if following is None:
                    ending = [column[-1].as_py() for column in batch.columns]
                    batch = batch.slice(0, batch.num_rows - 1)
                if batch.num_rows:
                    yield pa.Table.from_batches([batch])
        except pa.ArrowInvalid as error:
            raise _explained(error, stream) from error
        if ending != [_LAST] + [None] * (len(names) - 1):
            raise stream.refused(
                f"row {count - 1}, counted from 0: a quote is not closed. Close it, or declare "
                "another quote, or quote=None"
            )

    def _header(self, head: bytes, stream: TextStream) -> tuple[Sequence[str], str, int]:
        """Return the names of the columns, the delimiter, and the bytes before the first row."""
        lines = io.StringIO(head.decode("latin-1"), newline="")  # a character a byte
        for _ in range(self.skip_rows):
            lines.readline()
        start = begin = lines.tell()
        while (line := lines.readline()) and not line.strip("\r\n"):
            start = lines.tell()

        def first(delimiter: str) -> list[str]:
            lines.seek(start)
            quoting: Any = {"quotechar": self.quote} if self.quote else {"quoting": _UNQUOTED}
            read = python_csv.reader(
                lines,
                delimiter=delimiter,
                escapechar=self.escape,
                strict=self.header is True,
                **quoting,
            )
            try:
                return next(read, [])
            except python_csv.Error:  # no such record, or a field of more than 128 KiB
                return []

        delimiter = self.delimiter or max(_DELIMITERS, key=lambda each: len(first(each)))
        fields = first(delimiter)
        if self.header is not True:
            declared = self.columns.names if self.columns is not None else self.header
            names = _named(declared or [""] * len(fields))
            # With one column, empty lines are rows.
            return names, delimiter, begin if len(names) == 1 else start
        if not fields or lines.tell() >= _HEADER_BYTES:
            raise stream.refused(
                "it is empty, or it has no header that can be parsed and ends in "
                f"{_HEADER_BYTES >> 20} MiB. Check the quotes and the newlines, or declare "
                "header=False"
            )
        names = _named([field.encode("latin-1").decode().strip() for field in fields])
        lower = [name.lower() for name in names]
        if repeated := [name for name in names if lower.count(name.lower()) > 1]:
            raise stream.refused(
                f"the header has the column {repeated[0]!r} twice (SQL ignores case). Rename one, "
                "or declare skip_rows=1 and header=[...]"
            )
        return names, delimiter, lines.tell()


def _named(names: Sequence[str]) -> list[str]:
    """Name the columns that have no name, as pandas's index has none, by their numbers."""
    return [name or f"column{number}" for number, name in enumerate(names)]


def _explained(error: Exception, stream: TextStream) -> Exception:
    """Return what is wrong by the message of Arrow's reader, without the data in it."""
    if width := _WIDTH.search(str(error)):
        row, expected, actual = map(int, width.groups())
        return stream.refused(
            f"row {row - 1}, counted from 0, has {actual} fields, expected {expected}. Fix the "
            "row, or check delimiter=, quote= and skip_rows="
        )
    return stream.refused(
        "it cannot be parsed as CSV. Check whether a quote is not closed or a row has more than "
        f"{BLOCK >> 20} MiB, and delimiter=, quote= and escape="
    )


@known_keywords("vd.csv")
def csv(
    url: str | os.PathLike[str],
    *,
    schema: SchemaLike | None = None,
    types: SchemaLike | None = None,
    delimiter: str | None = None,
    header: bool | Sequence[str] = True,
    quote: str | None = '"',
    escape: str | None = None,
    null_values: Sequence[str] = (),
    skip_rows: int = 0,
    encoding: str = "utf-8",
    include_paths: bool = False,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> CsvSource:
    """Declare CSV files as a pipeline's source.

    The first run that needs a file converts it into Parquet in the store. It infers the type of
    each column from all values in its files, and later runs keep these types. ``007``, or a date
    that is not in the ISO format, makes a column text, which a `project` can convert. In later
    files, a row with a value of another type is quarantined, and new columns are not read until
    `types` names them.

    No whole number loses digits: a column is text if it has a value such as ``+5``, a whole number
    of more than 64 bits, or fractions beside a whole number of more than 15 digits. ``1.10`` is the
    number 1.1, so declare version numbers as VARCHAR. A column without values in the first run is
    text. A preview or a plan counts as the first run too.

    The partition fails if an id is invalid, a row has too few or too many fields, or a file has
    none of the columns, or has one in another case. A row has at most 16 MiB. White space around a
    value is ignored, except in columns of text.

    Each version of a file is converted once, while a run is planned: by tasks on the cluster with
    `RayCompute`, else in threads of the run. A conversion needs about 1 GB of memory, regardless of
    the file's size. ``vane-dagster store gc`` deletes copies that no run has needed for some days;
    a later run makes them again.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.csv`` and ``*.tsv`` below it, also
            with ``.gz``, ``.bz2`` or ``.zst``) or a glob, with ``{partition_key}`` or
            ``{partition_key.<dimension>}`` for a partitioned pipeline.
        schema: The columns of the source with their types; other columns are not read. A column
            that some files lack is null there.
        types: The types of some columns, instead of inferred ones. At least one file of the source
            must have each of these columns.
        delimiter: The character between fields. By default, in each file, the one of ``,``,
            tab, ``;`` and ``|`` that divides the header into the most fields.
        header: Whether the first row of each file has the names of the columns; or, for files
            without a header, a list of the names. A column without a name is ``column`` and its
            number, counted from 0.
        quote: The character around fields; None if fields are not quoted.
        escape: The character before a quote in a quoted field; the quote itself by default.
        null_values: Unquoted texts that are read as null, in addition to the empty text. A quoted
            empty text is an empty text in columns of text, and null in others.
        skip_rows: Lines before the header, or before the first row, that are not data.
        encoding: The encoding of the files: any that Python knows.
        include_paths: Whether there is a column `path` with the file's path.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without files or rows is accepted; an error by default.
            Without files, its columns are those of `schema` or of the first run.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is wrong.
        SchemaError: If a type is unknown.
    """
    where = "vd.csv"
    names = None if isinstance(header, bool) else list_of_names(where, "header", header)
    if names is not None and schema is not None:
        raise DefinitionError(
            f"{where}: header and schema both name the columns; leave the names out of header, for "
            "example header=False"
        )
    for name, value in (("quote", quote), ("escape", escape), ("delimiter", delimiter)):
        if value is not None and (not isinstance(value, str) or len(value.encode()) != 1):
            raise DefinitionError(f"{where}: {name} is {value!r}; expected one ASCII character")
    if type(skip_rows) is not int or skip_rows < 0:
        raise DefinitionError(f"{where}: skip_rows is {skip_rows!r}; expected a number from 0 up")
    return CsvSource.declared(
        *(url, schema, types, include_paths, asset, allow_empty, storage_options, encoding),
        delimiter=delimiter,
        header=header if names is None else names,
        quote=quote,
        escape=None if escape == quote else escape,
        null_values=list_of_names(where, "null_values", null_values) or (),
        skip_rows=skip_rows,
    )
