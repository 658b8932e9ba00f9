"""`FilesSource`: files of any format, one row a file. Functions open them through `File`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster._keywords import known_keywords
from vane_dagster.sources.base import FragmentRule, SourceTable
from vane_dagster.sources.file import path_of
from vane_dagster.sources.file_source import FileSource, Suffix, file_arguments
from vane_dagster.sources.grouping import SizedFile, divide
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord

PATH = "path"
"""The column with the path of a row's file, and the default id."""
_SCHEMA = pa.schema(
    [(PATH, pa.string()), ("size", pa.int64()), ("modified", pa.timestamp("us", "UTC"))]
)


@dataclass(frozen=True)
class FilesSource(FileSource):
    """Files that match a URL pattern for each partition, one row a file.

    The rows have the columns ``path``, ``size`` in bytes, and ``modified``, the time of the last
    change.

    Attributes:
        url: A local path or fsspec URL: a file, a folder or a glob.
        asset: Key of the Dagster asset that writes the files, such as "a/b"; None for none.
        allow_empty: Whether a partition without files is accepted.
        storage_options: Passed to fsspec; never part of a key.
    """

    kind: ClassVar[str] = "file"
    suffix: ClassVar[Suffix] = ""
    label: ClassVar[str | None] = "matching"
    default_id: ClassVar[str | None] = PATH
    names_files: ClassVar[bool] = True
    reads_contents: ClassVar[bool] = False

    @property
    def columns(self) -> pa.Schema:
        """The columns of the rows."""
        return _SCHEMA

    @property
    def _fixed_columns(self) -> Sequence[str]:
        """All of its columns."""
        return [*self.columns.names]

    @property
    def reading(self) -> str:
        """A text that identifies how rows are read from files."""
        return ""

    @property
    def splitting(self) -> str:
        return f"files, 1{self.reading}"

    def schema(self, location: str) -> pa.Schema:
        """Return the columns, which do not depend on the files."""
        return self.columns

    def row_bytes(self, file: FileRecord) -> int:
        """Return the estimated bytes that the row of a file needs in memory."""
        return file.size

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        """Group files, by a hash of their paths; see `grouping`."""
        sized = [
            SizedFile(file, [(1, max(1, self.row_bytes(file)))], self.reading, _detail(file))
            for file in files
        ]
        return SourceTable(self.columns, divide(sized, rule, share=1))

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        """Return the listing of the fragment's files; nothing is opened."""
        return listed_rows(fragment.spans).select(schema.names)


@known_keywords("vd.files")
def files(
    url: str | os.PathLike[str],
    *,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> FilesSource:
    """Declare files of any format as a pipeline's source: one row a file.

    The rows have the columns ``path``, ``size`` in bytes and ``modified``. The id is ``path``,
    unless the pipeline names another. Nothing is opened until a function asks for it: a parameter
    annotated as `File` gets the row's file, to `open`, `read`, or copy to a temporary file.

    A file is computed again if its ETag, or its size or modification time, changes. A local file
    that was touched but has the same content is not computed again. A moved file is a new row.

    A fragment, the unit of work and reuse, contains files of together up to 64 MiB, and at most
    ``fragment_rows`` files. Files are grouped by a hash of their paths, so an added file changes
    only its own group. Set ``fragment_rows`` of the pipeline if a single file takes long. If a file
    changes while a stage reads it, the partition fails, and the next run computes it.

    Args:
        url: A path or fsspec URL: a file, a folder (every file below it) or a glob, such as
            ``"s3://bucket/{partition_key}/**/*.wav"``. Names that begin with "." or "_" are
            ignored, and so are FIFOs, sockets and devices. A folder that a glob matches stands for
            the files below it. ``{partition_key}`` is replaced by the partition's key,
            ``{partition_key.<dimension>}`` by one dimension of a multi-partition,
            ``{partition_start:%Y/%m}`` and ``{partition_end}`` by the bounds of a time window.
        asset: The Dagster asset that writes the files: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without files is accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint. `File` uses
            them too.

    Raises:
        DefinitionError: If the URL is empty or has an unknown placeholder.
    """
    return FilesSource(*file_arguments("vd.files", url, asset, storage_options, allow_empty))


def listed_rows(spans: Sequence[FileSpan]) -> pa.Table:
    """Return the listing of files, one row a file."""
    details = [span.detail.split() for span in spans]
    sizes = [int(detail[0]) if detail else None for detail in details]
    times = [
        datetime.fromtimestamp(float(detail[1]), UTC) if len(detail) > 1 else None
        for detail in details
    ]
    paths = [path_of(span.url) for span in spans]
    return pa.table([paths, pa.array(sizes, pa.int64()), times], schema=_SCHEMA)


def _detail(file: FileRecord) -> str:
    return f"{file.size}" if not file.modified else f"{file.size} {file.modified:.6f}"
