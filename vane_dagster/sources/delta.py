"""`DeltaSource`: the rows of a Delta table at a version."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster._arguments import (
    PLACEHOLDER,
    check_placeholders,
    checked_url,
    fill_placeholders,
    filled_filter,
    list_of_names,
)
from vane_dagster._keywords import known_keywords
from vane_dagster._secrets import url_parts, with_options
from vane_dagster.errors import DefinitionError, SourceError, StoreError, VaneError, names
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    ReadContext,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
)
from vane_dagster.sources.delta_scan import DeltaReader, LiveRows
from vane_dagster.sources.delta_table import DataFile, DeltaVersion
from vane_dagster.sources.file_source import asset_path
from vane_dagster.sources.parquet import cut, read_footer
from vane_dagster.sources.parquet_scan import passing, reading_detail
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import IO_THREADS, Location
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.row_search import RowFile, find_any
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.sql import conjuncts

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

Version = int | str | datetime.datetime | None


@dataclass(frozen=True)
class DeltaSource(DeltaReader, Source):
    """The rows of a Delta table, at one version or at the latest one of each run.

    A unit is a data file with its deletion vector, so a commit that adds files computes only those.

    Attributes:
        url: The table's folder, with placeholders for the partition's key.
        table_version: A version, or a time; None for the latest version.
        filter: A row filter in SQL, with placeholders for the partition's key.
        columns: The columns to read; None for all.
        asset: Key of the Dagster asset that writes the table, as "a/b", if there is one.
        allow_empty: Whether a partition without rows is accepted.
        storage_options: Options of the fsspec file system.
        planned: The tables as the run plans them, by URL, once the source is bound to a store.
    """

    kind: ClassVar[str] = "delta"
    url: str
    table_version: Version = None
    filter: str | None = None
    columns: tuple[str, ...] | None = None
    asset: str | None = None
    allow_empty: bool = False
    planned: dict[str, DeltaVersion] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        texts = [text for text in (self.url, self.filter) if text and PLACEHOLDER.findall(text)]
        if partitions_def is not None and not texts:
            raise DefinitionError(
                f"{location}: neither the url nor the filter of vd.delta({self.url!r}) has "
                "{partition_key}, so that every partition would have the same rows; write "
                "filter=\"day = '{partition_key}'\", or leave partitions_def out"
            )
        for text in texts:
            check_placeholders(location, text, partitions_def)

    def describe(self) -> str:
        return f"Delta table {self.url}"

    @property
    def place(self) -> str:
        return self.url

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)

    def url_for(self, partition_key: str | None) -> str:
        """Return the URL of the table, and the partition's filter."""
        url, text = self._url_of(partition_key), filled_filter(self.filter, partition_key)
        return url if text is None else f"{url} where {text}"

    def schema(self, location: str) -> pa.Schema:
        if PLACEHOLDER.findall(self.url):
            return super().schema(location)
        return self._version(None, location).schema

    def bind(self, store: Store) -> Source:
        bound = replace(self)
        object.__setattr__(bound, "planned", {})
        return bound

    def for_workers(self) -> SourceReader:
        return DeltaReader(storage_options=self.storage_options)

    @property
    def splitting(self) -> str:
        return "positions of live rows, 1"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the data files of the version that may have rows of each partition.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.
        """
        opened = self if self.planned is not None else replace(self)
        if opened is not self:  # one version for all partitions
            object.__setattr__(opened, "planned", {})

        def listed(key: str | None) -> Listed:
            try:
                return tuple(file.record for file in opened._files(key, location))
            except SourceError as error:
                return error
            except VaneError as error:
                return SourceError(str(error))

        if partitions:  # the first alone: it loads the table that most sources have in common
            first = listed(partitions[0])
        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            others = threads.map(listed, partitions[1:])
            return dict(zip(partitions, itertools.chain([first] if partitions else [], others)))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        if self.allow_empty:
            return None
        return SourceError(
            f"{location}: no data file of {self.url_for(partition)!r} may have rows. Check the "
            "filter, write the partition first, or accept it with vd.delta(..., allow_empty=True)"
        )

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        version = self._version(partition, location)
        found = {(f.record.url, f.record.version): f for f in self._files(partition, location)}
        if gone := [file.url for file in files if (file.url, file.version) not in found]:
            raise SourceError(
                f"{location}: table {version.url!r} was changed while the run was planned, so that "
                f"{names(gone)} is no longer in it. Run the partition again"
            )
        data = [found[file.url, file.version] for file in files]
        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            cuts = list(threads.map(lambda file: self._cut(file, version, rule, location), data))
        partial: dict[str, list[str]] = {}
        for file, (_, absent) in zip(data, cuts):
            for name in absent:
                partial.setdefault(name, []).append(file.record.url)
        fragments = tuple(itertools.chain.from_iterable(each for each, _ in cuts))
        return SourceTable(version.schema, fragments, partial)

    def find(
        self, spans: Sequence[FileSpan], column: pa.Field, id: Any
    ) -> tuple[FileSpan, int] | None:
        """Find a row. Statistics are used for files without deletes and filters."""
        plain = [span for span in spans if LiveRows.of(span) is None]
        others = [span for span in spans if LiveRows.of(span) is not None]
        places = [Location(span.url, self.options_for(span.url)) for span in plain]
        files = [RowFile(p, "", span.start, span.stop) for p, span in zip(places, plain)]
        failed: Exception | None = None
        try:
            if (hit := find_any(files, [column.name], id)) is not None:
                return plain[hit[0]], hit[1].row
        except (FileNotFoundError, StoreError) as error:
            failed = error
        found = super().find(others, column, id)
        if found is None and failed is not None:
            raise failed
        return found

    def _url_of(self, key: str | None) -> str:
        return fill_placeholders(self.url, key)

    def _version(self, key: str | None, location: str) -> DeltaVersion:
        url = self._url_of(key)
        if self.planned is not None and url in self.planned:
            return self.planned[url]
        opened = DeltaVersion.open(
            Location(url, self.storage_options), self.table_version, self.columns, location
        )
        return opened if self.planned is None else self.planned.setdefault(url, opened)

    def _files(self, key: str | None, location: str) -> tuple[DataFile, ...]:
        return self._version(key, location).files(filled_filter(self.filter, key), location)

    def _cut(
        self, file: DataFile, version: DeltaVersion, rule: FragmentRule, location: str
    ) -> tuple[list[FragmentRecord], list[str]]:
        """Cut a data file into fragments along its row groups.

        Filtered rows are counted by reading the filter's columns.

        Returns:
            The fragments, and the columns that the file lacks.
        """
        try:
            found, footer = read_footer(file.record, self, location)
        except SourceError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise version.vacuumed(file.record.url, location) from error
            raise
        own = plain_schema(found)
        version.check_columns(own, file.record.url, location)
        needed = [*version.schema, *(file.filter.columns if file.filter else ())]
        cast = [f.name for f in needed if f.name in own.names and own.field(f.name).type != f.type]
        lacking = dict.fromkeys(f.name for f in needed if f.name not in own.names)
        constants = {name: file.constants.get(name) for name in lacking}
        detail = reading_detail(list(dict.fromkeys(cast)), constants)
        absent = [name for name in lacking if name not in file.constants]
        pieces = cut(file.record, footer, rule, detail=detail)
        if file.filter is None and not len(file.deleted):
            return list(pieces), absent
        passed = None
        if file.filter is not None:
            every = FileSpan(file.record.url, 0, footer.num_rows, detail)
            context = ReadContext(location, shared().cursor)
            passed = passing(
                every, file.filter.columns, file.filter.text, self.storage_options, context
            )
        fragments: list[FragmentRecord] = []
        start = 0
        for piece in pieces:
            inside = (file.deleted >= piece.start) & (file.deleted < piece.stop)
            live = LiveRows(piece.start, piece.stop, start, file.deleted[inside], file.filter)
            rows = _count(live, passed)
            if rows:
                details = [live.detail(cast, constants)]
                spans = [(file.record, start, start + rows)]
                fragments.append(fragment_record(spans, piece.bytes, details=details))
            start += rows
        return fragments, absent


def _count(live: LiveRows, passed: np.ndarray[Any, np.dtype[np.int64]] | None) -> int:
    """Return the number of rows at a range of positions, of which some pass the filter."""
    if passed is None:
        return live.last - live.first - len(live.deleted)
    inside = passed[(passed >= live.first) & (passed < live.last)]
    return len(np.setdiff1d(inside, live.deleted, assume_unique=True))


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
    DeltaVersion.check_url(where, url)
    if isinstance(version, bool) or not isinstance(
        version, (int, str, datetime.datetime, type(None))
    ):
        raise DefinitionError(
            f"{where}: version is {version!r}; expected a version number, or a time as a datetime "
            "or ISO 8601 text"
        )
    if filter is not None and not (isinstance(filter, str) and filter.strip()):
        raise DefinitionError(
            f'{where}: filter is {filter!r}; expected a row filter as text, as "n > 3"'
        )
    if filter is not None:
        conjuncts(PLACEHOLDER.sub("0", filter), where)
    return DeltaSource(
        url,
        version,
        filter,
        list_of_names(where, "columns", columns),
        asset_path(asset, where),
        allow_empty,
        storage_options=with_options(found, storage_options),
    )
