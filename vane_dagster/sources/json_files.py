"""`JsonSource`: files of JSON lines, read by Arrow's reader, or line by line where it refuses."""

from __future__ import annotations

import json as python_json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from vane_dagster._keywords import known_keywords
from vane_dagster._texts import listed
from vane_dagster.sources.column_types import LARGEST
from vane_dagster.sources.ingested_files import IngestedSource
from vane_dagster.sources.text_stream import TextStream, whole_lines, with_compressed
from vane_dagster.types.kinds import mapped
from vane_dagster.types.schema import SchemaLike

_SHOWN = 10
_BARE_NULL = re.compile(rb"(?:\A|\n|\})[ \t\r]*null")


@dataclass(frozen=True)
class JsonSource(IngestedSource):
    """Files of JSON lines that match a URL pattern for each partition; see `json`."""

    kind: ClassVar[str] = "json"
    label: ClassVar[str | None] = "JSON lines"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".json", ".jsonl", ".ndjson")
    is_text: ClassVar[bool] = False

    @property
    def reading(self) -> str:
        return f"{super().reading}{sorted(self._texts)}"

    @property
    def _texts(self) -> frozenset[str]:
        """The columns that are declared as text, whatever their values are."""
        declared = self.columns or self.types or ()
        return frozenset(each.name for each in declared if pa.types.is_string(each.type))

    def cast(self, column: pa.Field, is_found: bool, values: pa.Array) -> pa.Array:
        """See `IngestedSource`. Texts may be values of several types, as they stand in JSON."""
        kinds = values.type, column.type
        if is_found and [*map(pa.types.is_string, kinds)] == [True, False]:
            parsed = [None if v is None else python_json.loads(v) for v in values.to_pylist()]
            values = _column(parsed, is_text=False)
            if pa.types.is_string(values.type):
                raise pa.ArrowInvalid("a text is of no other type")
        return super().cast(column, is_found, values)

    def convert(self, stream: TextStream) -> Iterator[pa.Table]:
        yield pa.table({})
        line = 1
        for block in whole_lines(stream.blocks(), stream):
            if block.strip():
                yield self._parsed(block, line, stream)
            line += block.count(b"\n")

    def _parsed(self, block: bytes, line: int, stream: TextStream) -> pa.Table:
        """Parse whole lines."""
        if b"null" in block and _BARE_NULL.search(block):  # Arrow's reader crashes
            return _by_line(block, line, stream, self._texts)
        lines = sum(map(bool, map(bytes.strip, block.split(b"\n"))))
        with suppress(
            pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError, RecursionError
        ):
            table = _read_json(block, None)
            plain = pa.schema([pa.field(f.name, _as_text(f.type)) for f in table.schema])
            if plain != table.schema:  # texts that look like times
                table = _read_json(block, plain)
            others = [f.name for f in plain if not pa.types.is_string(f.type)]
            is_exact = self._texts.isdisjoint(others) and not any(map(_is_inexact, table.columns))
            if is_exact and len(table) == lines:  # it takes several objects in a line, too
                return table
        return _by_line(block, line, stream, self._texts)


@known_keywords("vd.json")
def json(
    url: str | os.PathLike[str],
    *,
    schema: SchemaLike | None = None,
    types: SchemaLike | None = None,
    encoding: str = "utf-8",
    include_paths: bool = False,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> JsonSource:
    """Declare JSON Lines files as a pipeline's source: each line is an object, which becomes a row.

    The first run that needs a file converts it into Parquet in the store. It infers the type of
    each column from all values in its files, and later runs keep these types. Strings are text,
    even if they look like dates. A column with values of several types is text, as written in JSON.
    In later files, a row with a value of another type is quarantined, unless it is a string that
    contains such a value, such as "7" for a number. New keys are not read until `types` names them.
    A key that a line lacks is null.

    Nested objects are structs. Numbers with a fraction or an exponent are doubles. If an object
    repeats a key, the last value counts. Files are converted in the same way as with `csv`.

    A JSON array instead of lines, a line that is not an object, and a number that no double can
    represent are errors. Such a line has no id, so its partition fails, and the error names the
    file and the lines. To quarantine only such lines, read them with `vd.text`, and parse them in a
    stage.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.json``, ``*.jsonl`` and ``*.ndjson``
            below it, also with ``.gz``, ``.bz2`` or ``.zst``) or a glob, with
            ``{partition_key}`` or ``{partition_key.<dimension>}`` for a partitioned pipeline.
        schema: The columns of the source with their types; other keys are not read.
        types: The types of some columns, instead of inferred ones, such as DATE for strings with
            ISO dates.
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
    return JsonSource.declared(
        url, schema, types, include_paths, asset, allow_empty, storage_options, encoding
    )


def _read_json(block: bytes, schema: pa.Schema | None) -> pa.Table:
    table = arrow_json.read_json(
        pa.BufferReader(block),
        arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
        arrow_json.ParseOptions(explicit_schema=schema),
    )
    table.validate()  # the reader truncates some lists
    return table


def _as_text(kind: pa.DataType) -> pa.DataType:
    """Return a type with strings in place of the times that Arrow's reader finds in strings."""
    return mapped(kind, lambda each: pa.string() if pa.types.is_timestamp(each) else each)


def _is_inexact(values: pa.ChunkedArray | pa.Array) -> bool:
    """Return whether Arrow's reader may have changed a number, or cannot represent a value."""
    kind = values.type
    if pa.types.is_floating(kind):
        return bool(pc.any(pc.greater_equal(pc.abs(values), float(LARGEST))).as_py())
    if pa.types.is_list(kind):
        return _is_inexact(pc.list_flatten(values))
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(map(_is_inexact, values.flatten()))
    return False


def _by_line(block: bytes, first: int, stream: TextStream, texts: Collection[str]) -> pa.Table:
    """Parse lines one by one."""
    rows, broken = [], []
    for number, line in enumerate(block.split(b"\n"), start=first):
        if not line.strip():
            continue
        try:
            value = python_json.loads(line, parse_float=_float)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            rows.append(value)
        else:
            broken.append(f"line {number}")
    if broken:
        raise stream.refused(
            "not a JSON object, or one with a number that is too large for a double: "
            f"{listed(broken, _SHOWN)}; expected an object a line. Fix the file: jq -rR "
            "'select(fromjson? | objects)' keeps the lines that are objects. Convert JSON that "
            "spans lines or is an array, for example with jq -c . or jq -c '.[]'"
        )
    keys = dict.fromkeys(key for row in rows for key in row)
    try:
        return pa.table(
            {key: _column([row.get(key) for row in rows], key in texts) for key in keys}
        )
    except (UnicodeEncodeError, RecursionError):
        raise stream.refused(
            f"in line {first} or one that follows, a string has a surrogate that is not a "
            "character, or a value is nested too deeply. Write it again"
        ) from None


def _column(values: Sequence[Any], is_text: bool) -> pa.Array:
    """Return a column; values without a common type as texts, as they stand in JSON."""
    try:
        array = pa.array(values, from_pandas=False)
        is_exact = not is_text and not _is_changed(values, array.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        is_exact = False
    if is_exact:
        return array
    texts = [
        value
        if value is None or isinstance(value, str)
        else python_json.dumps(value, ensure_ascii=False)
        for value in values
    ]
    return pa.array(texts, pa.string())


def _is_changed(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Return whether Arrow takes booleans for numbers, or the type is not that of other rows."""
    present = [value for value in values if value is not None]
    if pa.types.is_list(kind):
        return _is_changed([each for value in present for each in value], kind.value_type)
    if pa.types.is_struct(kind):
        parts = (_is_changed([v.get(f.name) for v in present], f.type) for f in kind)
        return not kind.num_fields or any(parts)
    is_bool_float = pa.types.is_floating(kind) and any(isinstance(v, bool) for v in present)
    return is_bool_float or pa.types.is_uint64(kind)


def _float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError("a number is too large")
    return number
