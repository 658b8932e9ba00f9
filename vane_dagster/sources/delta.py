"""`DeltaSource`: the rows of a Delta table at a version."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import PLACEHOLDER, check_installed, unexpected
from vane_dagster._keywords import known_keywords
from vane_dagster.sources.delta_table import DeltaTable
from vane_dagster.sources.lake_source import (
    Detail,
    FolderSource,
    LakeTable,
    Version,
    folder_arguments,
    lake_arguments,
)
from vane_dagster.sources.parquet_scan import scan
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileSpan
from vane_dagster.storage.table_options import driver_options, driver_url
from vane_dagster.types.sql import conjuncts


@dataclass(frozen=True)
class DeltaSource(FolderSource):
    """The rows of a Delta table.

    A unit is a data file with its deletion vector, so a commit that adds files computes only those.
    """

    kind: ClassVar[str] = "delta"
    cleanup: ClassVar[str] = "VACUUM"
    table_type: ClassVar[type[LakeTable]] = DeltaTable

    def load(self, url: str) -> Any:
        import deltalake
        from deltalake.exceptions import TableNotFoundError

        place = StoragePath(url, self.storage_options)
        try:
            table = deltalake.DeltaTable(driver_url(place), storage_options=driver_options(place))
            if self.table_version is not None:
                table.load_as_version(self.table_version)
        except TableNotFoundError:
            return None
        return table

    def read_rows(
        self, span: FileSpan, detail: Detail, schema: pa.Schema, location: str
    ) -> pa.Table:
        return scan(span, schema, self.storage_options, location, detail["constants"])


@known_keywords("vd.delta")
def delta(
    url: str | os.PathLike[str],
    *,
    version: Version = None,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    asset: Any = None,
    allow_empty: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> DeltaSource:
    """Declare a Delta table as a pipeline's source. It requires ``vane-dagster[delta]``.

    Deletion vectors are applied. Columns that were added or widened after a data file was written
    are null or cast; partition columns have their types. A table with column mapping is refused.

    A data file is computed again if the file, its deletion vector, its partition values or the
    columns that are read change. So a commit that adds files computes these files, and files that
    OPTIMIZE, MERGE or UPDATE rewrite are computed again. A version or data file that VACUUM has
    deleted is an error. Tables with column mapping, ``VARIANT``, or partition columns of the type
    ``BINARY``, and places other than local disks and S3, are refused. Row numbers, in a trace or a
    `row_id`, count the remaining rows, so a delete changes the numbers of the rows that follow: use
    an id column.

    Args:
        url: The table's folder, as a local path or ``s3://`` URL. ``{partition_key}`` is replaced
            by the partition's key, ``{partition_key.<dimension>}`` by one dimension of a
            multi-partition, ``{partition_start}`` and ``{partition_end}`` by the bounds of a time
            window, such as ``2026-01-01T00:00:00+00:00``.
        version: A version number, or a time as a ``datetime`` or ISO 8601 text, in UTC without a
            zone. By default each run reads the version that is the latest when it is planned, and
            computes only the data files that are new or have new deletes.
        filter: A row filter in SQL, such as ``"day = '{partition_key}'"``, with placeholders as in
            the URL. Dates, texts and timestamps without a zone need a format that they can be
            compared with, as in ``{partition_start:%Y-%m-%d %H:%M:%S}``. Conditions on partition
            columns of the table select files. Other rows are counted when the run is planned, by
            reading the filter's columns.
        columns: The columns to read; all by default. A change of the schema of other columns then
            computes nothing.
        asset: The Dagster asset that writes the table: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without any rows is accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument has another form, or deltalake is not installed.
    """
    where = "vd.delta"
    check_installed(where, "deltalake", "delta")
    if isinstance(version, str):
        try:
            version = datetime.datetime.fromisoformat(version)
        except ValueError:
            expected = 'the number of a version, or a time, such as "2026-01-31T18:00:00Z"'
            raise unexpected(where, "version", version, expected) from None
    place = folder_arguments(where, url, version, storage_options)
    if filter is not None:
        conjuncts(PLACEHOLDER.sub("0", filter), where)
    return DeltaSource(**place, **lake_arguments(where, filter, columns, asset, allow_empty))
