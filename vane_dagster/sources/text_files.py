"""`TextSource`: files of text, a row a line."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import known_keywords
from vane_dagster.sources.base import FragmentRule, ReadContext
from vane_dagster.sources.record_files import (
    Blocks,
    FileLayout,
    ParseError,
    RecordSource,
    SmallFiles,
    after_bom,
    begin,
    parsed_options,
)
from vane_dagster.sources.record_scan import Cut, LineFinder, RecordFinder, scan
from vane_dagster.sources.text_stream import TextStream, whole_lines, with_compressed

_TEXT = pa.schema([("text", pa.string())])


@dataclass(frozen=True)
class TextSource(RecordSource):
    """Files of text that match a URL pattern for each partition; see `text`."""

    kind: ClassVar[str] = "text"
    function: ClassVar[str] = "vd.text"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".txt")

    def inspect(self, stream: TextStream, rule: FragmentRule | None) -> FileLayout:
        head, _, rest = begin(stream)
        start = after_bom(head)
        blocks = itertools.chain([head[start:]], rest)
        found = scan(blocks, LineFinder(), rule, Cut(0, start, 0))
        return FileLayout(_TEXT, found.cuts, {})

    def finder(self, form: Mapping[str, Any]) -> RecordFinder:
        return LineFinder()

    def parse(
        self,
        blocks: Blocks,
        size: int,
        form: Mapping[str, Any],
        schema: pa.Schema,
        context: ReadContext,
    ) -> pa.Table:
        lines = pa.chunked_array([_lines(chunk) for chunk in whole_lines(blocks())], pa.string())
        return pa.table({"text": lines}).select(schema.names)


@known_keywords("vd.text")
def text(
    url: str | os.PathLike[str],
    *,
    encoding: str = "utf-8",
    include_paths: bool = False,
    small_files: SmallFiles = "group",
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> TextSource:
    """Declare files of text as a pipeline's source: a row a line, in the column `text`.

    Lines end in LF or CRLF, which are no part of the text. An empty line is a row.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.txt`` below it, also with ``.gz``,
            ``.bz2``, ``.xz`` or ``.zst``) or a glob, with ``{partition_key}`` or
            ``{partition_key.<dimension>}`` for a partitioned pipeline.
        encoding: The encoding of the files: any that Python knows.
        include_paths: Whether there is a column `path` with the file's path.
        small_files: "group" combines small files in a fragment, "separate" makes at least one
            fragment of each file; see `parquet`.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether files without any rows are accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is wrong.
    """
    return TextSource(
        **parsed_options(
            "vd.text", url, asset, allow_empty, storage_options, encoding, small_files
        ),
        include_paths=include_paths,
    )


def _lines(chunk: bytes) -> pa.Array:
    """Return the lines of a text, without their ends."""
    ended = chunk[:-1] if chunk.endswith(b"\n") else chunk
    lines = pc.split_pattern(pa.array([ended], pa.large_binary()), b"\n").flatten()
    if b"\r" in chunk:
        has_return = pc.ends_with(lines, b"\r")
        lines = pc.if_else(has_return, pc.binary_slice(lines, 0, -1), lines)
    try:
        return lines.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise ParseError(
            'it is not valid UTF-8. Set encoding= to the encoding of the file, as "latin-1"'
        ) from error
