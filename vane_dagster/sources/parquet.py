"""`ParquetSource`: Parquet files, split along their row groups."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._arguments import one_of
from vane_dagster._keywords import known_keywords
from vane_dagster._lazy import pq
from vane_dagster.errors import SourceError, described
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import (
    FragmentRule,
    Source,
    SourceReader,
    SourceTable,
)
from vane_dagster.sources.file_source import FileSource, file_arguments
from vane_dagster.sources.grouping import SMALL_SHARE, SizedFile, divide
from vane_dagster.sources.parquet_scan import scan
from vane_dagster.sources.schemas import common_columns
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.packed_tensors import schema_of_rows
from vane_dagster.types.schema import is_untyped

SmallFiles = Literal["separate", "group"]

PARQUET = "parquet"
"""The kind of every source of Parquet files."""


class ParquetReader(SourceReader):
    """Reads fragments of Parquet files."""

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        return pa.concat_tables(
            scan(span, schema, self.options_for(span.url), location) for span in fragment.spans
        )


@dataclass(frozen=True)
class StoredParquet(ParquetReader):
    """Reads Parquet files in a store, or published by it, with the store's storage options.

    Attributes:
        root: The store's root.
        fallback: The root of a branch's fallback.
    """

    root: StoragePath
    fallback: StoragePath | None = None

    def options_for(self, url: str) -> Mapping[str, Any]:
        options = self.root.options_for(url)
        return self.fallback.options_for(url) if self.fallback and not options else options


class ParquetFiles(ParquetReader, Source):
    """A source of Parquet files, independent of how they are listed."""

    kind: ClassVar[str] = PARQUET
    small_files: SmallFiles = "separate"

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Read the files' footers, cut the files into fragments, and group small ones."""
        if not files:
            return SourceTable(self.schema(location), ())
        footers = in_threads(lambda file: read_footer(file, self, location), files)
        typed = [(file, *read) for file, read in zip(files, footers) if not _is_untyped(*read)]
        if not typed:
            return self.split((), rule, location, partition)
        columns = [(file.url, own) for file, own, _ in typed]
        schema, extras = common_columns(columns, location)
        sized = [
            SizedFile(file, row_groups(metadata), extra)
            for (file, _, metadata), extra in zip(typed, extras)
        ]
        fragments = divide(sized, rule, SMALL_SHARE if self.small_files == "group" else 0)
        return SourceTable(schema, fragments)


@dataclass(frozen=True)
class ParquetSource(FileSource, ParquetFiles):
    """Parquet files that match a URL pattern for each partition.

    Attributes:
        url: A local path or fsspec URL: a file, a folder or a glob. ``{partition_key}`` is replaced
            by the key, ``{partition_key.<dimension>}`` by one dimension of a multi-partition,
            ``{partition_start:%Y/%m}`` and ``{partition_end}`` by the bounds of a time window.
        asset: Key of the Dagster asset that writes the files, such as "a/b"; None for none.
        allow_empty: Whether a partition without files or rows is accepted.
        storage_options: Passed to fsspec; never part of a key.
        small_files: "separate" or "group"; see `parquet`.
    """

    suffix: ClassVar[str] = ".parquet"
    label: ClassVar[str | None] = "Parquet"
    small_files: SmallFiles = "separate"

    def schema(self, location: str) -> pa.Schema:
        """Return the columns of the last file of all partitions; files without types come last."""
        for file in reversed(self._all_files(location)):
            footer = read_footer(file, self, location)
            if not _is_untyped(*footer):
                break
        return common_columns([(file.url, footer[0])], location)[0]

    @property
    def splitting(self) -> str:
        return "group small files, 1" if self.small_files == "group" else ""


@known_keywords("vd.parquet")
def parquet(
    url: str | os.PathLike[str],
    *,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    small_files: SmallFiles = "separate",
) -> ParquetSource:
    """Declare Parquet files as a pipeline's source.

    Only the columns that stages need are read. Large files are divided at row groups. Files of a
    partition may differ in columns and types; see docs/concepts/sources.md.

    Args:
        url: A path or fsspec URL: a file, a folder (every ``*.parquet`` below it) or a glob. A user
            and password in it become storage options, which are not part of keys or manifests.
            ``{partition_key}`` is replaced by the partition's key, ``{partition_key.<dimension>}``
            by one dimension of a multi-partition.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without files or rows is accepted; an error by default.
            Without files, or with only an empty file whose columns have the type null, it has the
            columns of the last other file in any partition.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.
        small_files: "separate" makes at least one fragment, and so one part, for each file. "group"
            combines up to 1,024 small files in a fragment: files with at most 1/8 of
            ``fragment_rows`` rows and 1/8 of a fragment's 64 MiB. An added or rewritten file
            recomputes its own group, and sometimes the groups that follow, up to the next file
            whose path hash marks the end of a group. Changing this value recomputes the rows of
            small files.

    Raises:
        DefinitionError: If the URL is empty or has an unknown placeholder.
    """
    arguments = file_arguments("vd.parquet", url, asset, storage_options, allow_empty)
    one_of("vd.parquet", "small_files", small_files, ("separate", "group"))
    return ParquetSource(*arguments, small_files)


def read_footer(
    file: FileRecord, source: SourceReader, location: str
) -> tuple[pa.Schema, pq.FileMetaData]:
    """Read the columns and the metadata of a Parquet file."""
    path = StoragePath(file.url, source.options_for(file.url))

    def read() -> pq.FileMetaData:
        with path.fs.open(path.path, "rb") as stream:
            return pq.read_metadata(stream)

    try:
        metadata = with_retries(_failpoints.failing("read", file.url, read))
        return schema_of_rows(metadata.schema.to_arrow_schema()), metadata
    except Exception as error:  # from pyarrow, or from a file system's driver
        raise SourceError(
            f"{location}: {file.url!r} ({file.size} bytes) cannot be read as Parquet: "
            f"{described(error)}. If it has another format, use the source for that format, such "
            "as vd.csv, or convert it, as with DuckDB's COPY (FROM 'data.csv') TO 'data.parquet' "
            "(FORMAT parquet). Else write it again, or take it out of the source"
        ) from error


def _is_untyped(columns: pa.Schema, footer: pq.FileMetaData) -> bool:
    """Return whether a file has neither rows nor all types, as pandas writes an empty frame."""
    return not footer.num_rows and any(is_untyped(column.type) for column in columns)


def row_groups(footer: pq.FileMetaData) -> list[tuple[int, int]]:
    """Return the rows and bytes of each row group of a file."""
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    return [(group.num_rows, group.total_byte_size) for group in groups]
