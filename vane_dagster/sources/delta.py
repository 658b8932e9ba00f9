"""`DeltaSource`: the rows of a Delta table at a version."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import PLACEHOLDER, checked_url
from vane_dagster._keywords import known_keywords
from vane_dagster._secrets import url_parts, with_options
from vane_dagster.errors import DefinitionError, SourceError
from vane_dagster.sources.base import ReadContext, SourceReader, cleaned_up, is_gone
from vane_dagster.sources.delta_table import VACUUM, DeltaTable, LiveRows, Version
from vane_dagster.sources.lake_source import LakeSource, LakeTable, lake_arguments
from vane_dagster.sources.parquet import ParquetReader
from vane_dagster.sources.parquet_scan import scan
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.table_options import check_table_url
from vane_dagster.types.sql import conjuncts


@dataclass(frozen=True)
class DeltaReader(ParquetReader):
    """Reads rows of the data files of Delta tables.

    Attributes:
        storage_options: Options of the fsspec file system.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, kw_only=True)

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.storage_options

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read rows as Parquet, without deleted rows and those that do not pass the filter."""
        with self._cleanup_errors(fragment, context.location):
            return pa.concat_tables(self._read(span, schema, context) for span in fragment.spans)

    def project(
        self,
        fragment: FragmentRecord,
        schema: pa.Schema,
        columns: Sequence[tuple[str, str]],
        where: str | None,
        context: ReadContext,
    ) -> pa.Table | None:
        """Push SQL into the scan of files without deletes and filters."""
        if any(LiveRows.of(span) for span in fragment.spans):
            return None
        with self._cleanup_errors(fragment, context.location):
            return super().project(fragment, schema, columns, where, context)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record of a data file, which never changes once it is written."""
        location = Location(file.url, self.storage_options)
        return dataclasses.replace(file, size=int(location.fs.info(location.path)["size"]))

    @contextmanager
    def _cleanup_errors(self, fragment: FragmentRecord, location: str) -> Iterator[None]:
        """Name the cause of an error for a data file that is gone."""
        try:
            yield
        except SourceError as error:
            for span in fragment.spans:
                if is_gone(span.url, self.options_for(span.url)):
                    version = "the version of a Delta table that was planned"
                    raise cleaned_up(span.url, version, VACUUM, location) from error
            raise

    def _read(self, span: FileSpan, schema: pa.Schema, context: ReadContext) -> pa.Table:
        options, live = self.options_for(span.url), LiveRows.of(span)
        if live is None:
            return scan(span, schema, options, context)
        every = dataclasses.replace(span, start=live.first, stop=live.first + len(live.mask))
        table = scan(every, schema, options, context).filter(pa.array(live.mask))
        return table.slice(span.start - live.start, span.stop - span.start)


@dataclass(frozen=True)
class DeltaSource(DeltaReader, LakeSource):
    """The rows of a Delta table.

    A unit is a data file with its deletion vector, so a commit that adds files computes only those.

    Attributes:
        url: The table's folder, with placeholders for the partition's key.
        table_version: A version, or a time; None for the latest version.
    """

    kind: ClassVar[str] = "delta"
    function: ClassVar[str] = "vd.delta"
    url: str
    table_version: Version = None

    @property
    def place(self) -> str:
        return self.url

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def for_workers(self) -> SourceReader:
        return DeltaReader(storage_options=self.storage_options)

    def open_table(self, url: str, location: str) -> LakeTable:
        place = Location(url, self.storage_options)
        return DeltaTable.open(place, self.table_version, self.columns, self, location)


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

    Args:
        url: The table's folder, as a local path or ``s3://`` URL. ``{partition_key}`` is replaced
            by the partition's key, ``{partition_key.<dimension>}`` by one dimension of a
            multi-partition.
        version: A version number, or a time as a ``datetime`` or ISO 8601 text. By default each run
            reads the version that is the latest when it is planned, and computes only the data
            files that are new or have new deletes.
        filter: A row filter in SQL, as ``"day = '{partition_key}'"``, with placeholders as in the
            URL. Conditions on partition columns of the table select files. Other rows are counted
            when the run is planned, by reading the filter's columns.
        columns: The columns to read; all by default. A change of the schema of other columns then
            computes nothing.
        asset: The Dagster asset that writes the table: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without any rows is accepted; an error by default.
        storage_options: Options of the fsspec file system, such as an S3 endpoint.

    Raises:
        DefinitionError: If an argument has another form, or deltalake is not installed.
    """
    where = "vd.delta"
    if find_spec("deltalake") is None:
        raise DefinitionError(f"{where} needs the package deltalake. Install vane-dagster[delta]")
    url, found = url_parts(checked_url(where, url))
    check_table_url(where, url, "Delta")
    if isinstance(version, bool) or not isinstance(
        version, (int, str, datetime.datetime, type(None))
    ):
        raise DefinitionError(
            f"{where}: version is {version!r}; expected a version number, or a time as a datetime "
            "or ISO 8601 text"
        )
    arguments = lake_arguments(where, filter, columns, asset, allow_empty)
    if filter is not None:
        conjuncts(PLACEHOLDER.sub("0", filter), where)
    options = with_options(found, storage_options)
    return DeltaSource(url, version, storage_options=options, **arguments)
