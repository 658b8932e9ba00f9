"""`TextSource`: files of text, a row a line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import known_keywords
from vane_dagster.sources.ingested_files import IngestedSource
from vane_dagster.sources.text_stream import TextStream, whole_lines, with_compressed

_SCHEMA = pa.schema([("text", pa.string())])


@dataclass(frozen=True)
class TextSource(IngestedSource):
    """Files of text that match a URL pattern for each partition; see `text`."""

    kind: ClassVar[str] = "text"
    suffix: ClassVar[tuple[str, ...]] = with_compressed(".txt")

    _types_note = ""  # vd.text takes no types=

    def _found_types(self, *given: Any) -> pa.Schema:
        return _SCHEMA

    def convert(self, stream: TextStream) -> Iterator[pa.Table]:
        yield _SCHEMA.empty_table()
        for block in whole_lines(stream.blocks(), stream):
            ended = pa.array([block.removesuffix(b"\n")], pa.large_binary())
            lines = pc.split_pattern(ended, b"\n").flatten()
            has_return = pc.ends_with(lines, b"\r")
            lines = pc.if_else(has_return, pc.binary_slice(lines, 0, -1), lines)
            yield pa.table([lines.cast(pa.string())], schema=_SCHEMA)


@known_keywords("vd.text")
def text(
    url: str | os.PathLike[str],
    *,
    encoding: str = "utf-8",
    include_paths: bool = False,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> TextSource:
    """Declare text files as a pipeline's source: each line is a row, in the column `text`.

    Lines end in LF or CRLF, which are not part of the text. An empty line is a row too. The first
    run that needs a file converts it into Parquet in the store.

    Lines have no id: use ``id=vd.row_id()``. Files are converted like those of `csv`.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.txt`` below it, also with ``.gz``,
            ``.bz2`` or ``.zst``) or a glob, with ``{partition_key}`` or
            ``{partition_key.<dimension>}`` for a partitioned pipeline.
        encoding: The encoding of the files: any that Python knows.
        include_paths: Whether there is a column `path` with the file's path.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without files or rows is accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument is wrong.
    """
    return TextSource.declared(
        url, None, None, include_paths, asset, allow_empty, storage_options, encoding
    )
