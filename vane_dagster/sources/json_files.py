"""`JsonSource`: files of JSON lines, read by DuckDB."""

from __future__ import annotations

import itertools
import json as python_json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import duckdb
import pyarrow as pa

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import SourceError
from vane_dagster.sources.base import FragmentRule, ReadContext
from vane_dagster.sources.duckdb_stream import as_file
from vane_dagster.sources.exact_types import InexactError, convert, raw_type
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
from vane_dagster.sources.record_scan import Cut, FilledLineFinder, RecordFinder, scan
from vane_dagster.sources.text_stream import TextStream, with_compressed
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.schema import SchemaLike, type_name
from vane_dagster.types.sql import literal
from vane_dagster.types.sql import quote as quoted_name

_OBJECT_LIMIT = 16_000_000
"""Bytes of a record for which DuckDB's default buffers are large enough."""
_SMALL = 1 << 20
_RENAMED = re.compile(r"(.*)_\d+", re.DOTALL)


@dataclass(frozen=True)
class JsonSource(RecordSource):
    """Files of JSON lines that match a URL pattern for each partition; see `json`."""

    kind: ClassVar[str] = "json"
    function: ClassVar[str] = "vd.json"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".json", ".jsonl", ".ndjson")

    @property
    def label(self) -> str:
        return "JSON lines"

    def inspect(self, stream: TextStream, rule: FragmentRule | None) -> FileLayout:
        head, is_all, rest = begin(stream)
        start = after_bom(head)
        first = head[start:].lstrip()
        if first.startswith(b"["):
            raise SourceError(
                f"{stream.location}: {stream.url!r} is a JSON array, expected JSON lines: one "
                "object a line. Convert it, for example with jq -c '.[]', or with DuckDB: COPY "
                "(FROM 'data.json') TO 'data.jsonl' (FORMAT json)"
            )
        if not first and is_all:
            return FileLayout(self.columns or pa.schema([]), (Cut(0, start, 0),), {})
        found = scan(
            itertools.chain([head[start:]], rest), FilledLineFinder(), rule, Cut(0, start, 0)
        )
        form = {"longest": found.longest} if found.longest > _OBJECT_LIMIT else {}
        schema = self.columns
        if schema is None:
            end = len(head) if is_all else head.rfind(b"\n") + 1 or len(head)
            schema = pinned(
                self._sniffed(head[start:end], form, stream),
                None,
                self.types,
                stream.url,
                stream.location,
            )
        return FileLayout(schema, found.cuts, form)

    def finder(self, form: Mapping[str, Any]) -> RecordFinder:
        return FilledLineFinder()

    def parse(
        self,
        blocks: Blocks,
        size: int,
        form: Mapping[str, Any],
        schema: pa.Schema,
        context: ReadContext,
    ) -> pa.Table:
        try:
            with as_file(context.connect(), blocks, size) as url:
                rows = _rows(url, schema, form)
                listed = ", ".join(quoted_name(name) for name in schema.names) or "1 AS one"
                query = f"SELECT {listed} FROM {rows}"
                table = context.connect().sql(query).to_arrow_table()
            return convert(table, schema, context.connect) if len(schema) else table.select([])
        except InexactError as error:
            raise unfit(error) from error
        except duckdb.Error as error:
            if len(schema) > 1 and size < _SMALL:
                for column in schema:  # DuckDB does not say which one it is
                    self.parse(blocks, size, form, pa.schema([column]), context)
            raise _explained(error, schema) from error

    def _sniffed(self, head: bytes, form: Mapping[str, Any], stream: TextStream) -> pa.Schema:
        """Return the columns that DuckDB finds in a head."""
        arguments = f"format='newline_delimited', records=true, sample_size=-1{_limit(form)}"
        try:
            with as_file(shared(), lambda: iter([head]), len(head)) as url:
                query = f"DESCRIBE FROM read_json({literal(url)}, {arguments})"
                found = shared().cursor().execute(query).fetchall()
        except duckdb.Error as error:
            if refused := self._first_refused(head, stream):
                raise refused from error
            if not any(_objects(head)):
                return pa.schema([])
            self._check_keys(head, stream)
            reason = _explained(error, None).reason
            raise SourceError(f"{stream.location}: {stream.url!r}: {reason}") from error
        names = {name.lower() for name, *_ in found}
        if any((m := _RENAMED.fullmatch(name)) and m[1] in names for name in names):
            self._check_keys(head, stream)
        return pa.schema([(name, arrow_type(kind)) for name, kind, *_ in found])

    def _first_refused(self, head: bytes, stream: TextStream) -> SourceError | None:
        """Return the error for the first line that is no object, if there is one."""
        for number, line in enumerate(head.split(b"\n"), start=1):
            try:
                value = python_json.loads(line) if line.strip() else None
            except UnicodeDecodeError:
                reason = _NOT_UTF_8
            except ValueError:
                reason = _MALFORMED
            else:
                if value is None or isinstance(value, dict):
                    continue
                reason = f"it is {_JSON_TYPES[type(value)]}; {_OBJECTS}"
            return SourceError(f"{stream.location}: {stream.url!r}, line {number}: {reason}")
        return None

    def _check_keys(self, head: bytes, stream: TextStream) -> None:
        """Refuse keys that SQL does not distinguish: DuckDB renames the second one, or fails."""
        keys: dict[str, str] = {}
        for path in itertools.chain.from_iterable(map(_paths, _objects(head))):
            if (known := keys.setdefault(path.lower(), path)) != path:
                raise SourceError(
                    f"{stream.location}: {stream.url!r} has the keys {known!r} and {path!r}, which "
                    "are the same name to SQL. Rename one in the file, or declare the one to read "
                    "by schema="
                )


@known_keywords("vd.json")
def json(
    url: str | os.PathLike[str],
    *,
    schema: SchemaLike | None = None,
    types: SchemaLike | None = None,
    encoding: str = "utf-8",
    include_paths: bool = False,
    small_files: SmallFiles = "group",
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> JsonSource:
    """Declare files of JSON lines as a pipeline's source: an object a line, a row an object.

    DuckDB finds the columns and their types in the head of each file (4 MiB). A key that a line
    lacks is null. Keys that occur later alone are not read: declare the columns by `schema` to have
    them. A later value that does not fit its column's type is an error with file and line.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.json``, ``*.jsonl`` and ``*.ndjson``
            below it, also with ``.gz``, ``.bz2``, ``.xz`` or ``.zst``) or a glob, with
            ``{partition_key}`` or ``{partition_key.<dimension>}`` for a partitioned pipeline.
        schema: The columns of the source with their types; other keys are not read.
        types: The types of some columns, in place of those that DuckDB finds.
        encoding: The encoding of the files: any that Python knows.
        include_paths: Whether there is a column `path` with the file's path.
        small_files: "group" combines small files in a fragment, "separate" makes at least one
            fragment of each file; see `parquet`.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether files without any rows are accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is wrong.
        SchemaError: If a type is unknown.
    """
    columns, pinned_types = declared_types("vd.json", schema, types)
    return JsonSource(
        **parsed_options(
            "vd.json", url, asset, allow_empty, storage_options, encoding, small_files
        ),
        include_paths=include_paths,
        columns=columns,
        types=pinned_types,
    )


_JSON_TYPES = {
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "an array",
}
_NOT_UTF_8 = 'it is not valid UTF-8. Set encoding= to the encoding of the file, as "latin-1"'
_OBJECTS = "expected an object a line. Fix the file, or take it out of the source"
_MALFORMED = (
    "it is not valid JSON; expected an object a line. Fix the file, or convert JSON that spans "
    "lines, for example with jq -c ."
)


def _objects(head: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects of valid JSON lines."""
    for line in head.split(b"\n"):
        if line.strip() and (value := python_json.loads(line)):
            yield value


def _paths(value: Any, parent: str = "") -> Iterator[str]:
    """Yield the keys of an object and of those in it, as "a.b"; lists count for their elements."""
    if isinstance(value, list):
        for each in value:
            yield from _paths(each, parent)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f"{parent}{key}"
            yield from _paths(inner, f"{parent}{key}.")


def _rows(url: str, schema: pa.Schema, form: Mapping[str, Any]) -> str:
    """Return the call of `read_json` for some columns."""
    fields = [(column.name, raw_type(column.type)) for column in schema]
    fields = fields or [("", pa.string())]  # DuckDB reads no rows without columns
    columns = ", ".join(f"{literal(name)}: {literal(sql_code(kind))}" for name, kind in fields)
    return (
        f"read_json({literal(url)}, format='newline_delimited', records=true, auto_detect=false, "
        f"columns={{{columns}}}{_limit(form)})"
    )


def _limit(form: Mapping[str, Any]) -> str:
    return f", maximum_object_size={form['longest'] + 1}" if "longest" in form else ""


def _explained(error: duckdb.Error, schema: pa.Schema | None) -> ParseError:
    """Return what is wrong by DuckDB's message, without the data in it."""
    text = str(error)
    if "invalid UTF-8" in text:
        return ParseError(_NOT_UTF_8)
    if "Malformed JSON" in text:
        return ParseError(_MALFORMED)
    if "duplicate key" in text:
        return ParseError("an object has a key twice. Remove one")
    if "Expected OBJECT" in text and "JSON transform" in text and schema is None:
        return ParseError(f"it is no object; {_OBJECTS}")
    if schema is not None and len(schema) == 1 and "JSON transform" in text:
        return misfit(schema.field(0).name, type_name(schema.field(0).type))
    return ParseError(f"{type(error).__name__} of DuckDB; {_OBJECTS}")
