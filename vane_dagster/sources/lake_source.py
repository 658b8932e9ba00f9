"""`LakeSource`: rows of a table at a version, which the library of the table's format plans.

The library lists the version's data files, selects those that may have rows of a partition, and
applies deletes and changes of the schema. A unit of it is one file, or one fragment, of the table.

Rows of a unit are numbered without those that are deleted or do not pass the filter. The detail of
a span is a JSON object with what the library needs to read its rows. For Parquet files, "live" in
it has a bit for each row of its range, which says whether it is left. Lance counts the rows that
are left itself.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._arguments import (
    PLACEHOLDER,
    check_placeholders,
    checked_url,
    fill_placeholders,
    filled_filter,
    list_of_names,
)
from vane_dagster._lazy import pq
from vane_dagster.errors import DefinitionError, SourceError, VaneError, first_line
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
    unreadable,
)
from vane_dagster.sources.file_source import asset_path, key_in_path
from vane_dagster.sources.files import listed_file
from vane_dagster.sources.grouping import SizedFile, cut
from vane_dagster.sources.parquet import row_groups
from vane_dagster.storage.filesystem import absolute_url, in_threads
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.table_options import check_table_url
from vane_dagster.types.tensors import unsliced

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Units = Mapping[FileRecord, Any]
"""Units by their record, each with what its table needs to cut it."""
Version = int | str | datetime.datetime | None
Detail = Mapping[str, Any]
"""What a library needs to read the rows of a span."""


class LakeTable(ABC):
    """A table at one version, as a run plans it.

    Attributes:
        schema: The columns to read, with their types.
    """

    schema: pa.Schema

    def __init__(self, source: Any, location: str, table: Any, name: str) -> None:
        self.location = location
        self._source, self._table = source, table
        self._owner = f"{location}: {source.kind.capitalize()} table {name!r}"
        self._units: dict[str | None, Units] = {}

    def units(self, where: str | None) -> Units:
        """Return the units that may have rows that pass a filter, listed once."""
        if where not in self._units:
            self._units[where] = dict(self.list_units(where))
        return self._units[where]

    @abstractmethod
    def list_units(self, where: str | None) -> Iterable[tuple[FileRecord, Any]]:
        """List the units that may have rows that pass a filter, in the order of their rows."""

    def forget(self) -> None:  # noqa: B027  # only some formats keep what they have read
        """Free what was read to list units, once those of all partitions are listed."""

    @abstractmethod
    def cut(self, record: FileRecord, unit: Any, rule: FragmentRule) -> Iterable[FragmentRecord]:
        """Cut a unit into fragments."""


@dataclass(frozen=True, kw_only=True)
class LakeSource(Source):
    """The rows of a table, at one version or at the latest one of each run.

    The data files of a table never change once they are written.

    Attributes:
        table_type: A version of a table of this format.
        cleanup: The operation that deletes the data files of former versions.
        filter: A row filter, with placeholders for the partition's key.
        columns: The columns to read; None for all.
        asset: Key of the Dagster asset that writes the table, such as "a/b"; None for none.
        allow_empty: Whether a partition without rows is accepted.
        planned: The tables of a run, by URL, once the source is bound to a store.
    """

    reads_contents: ClassVar[bool] = False
    table_type: ClassVar[type[LakeTable]]
    cleanup: ClassVar[str]
    filter: str | None = None
    columns: tuple[str, ...] | None = None
    asset: str | None = None
    allow_empty: bool = False
    planned: dict[str, LakeTable] | None = field(default=None, repr=False, compare=False)

    @abstractmethod
    def load(self, url: str) -> Any:
        """Load the version to read of a table by its library; None if it does not exist."""

    def open_table(self, url: str, location: str) -> LakeTable:
        """Open the version to read of a table."""
        what = f"{location}: {self.kind.capitalize()} table {url!r}"
        try:
            if (loaded := with_retries(lambda: self.load(url))) is not None:
                return self.table_type(self, location, loaded, url)
        except VaneError:
            raise
        except Exception as error:  # drivers raise plain exceptions too
            raise SourceError(
                f"{what} cannot be read: {type(error).__name__}: {first_line(error)}. Check the "
                "version, and that the credentials reach the table"
            ) from error
        raise SourceError(
            f"{what} does not exist, or does not have the given version, which may have been "
            "cleaned up. Check both, or write the table first"
        )

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        texts = [each for each in (self.place, self.filter or "") if PLACEHOLDER.search(each)]
        if partitions_def is not None and not texts:
            raise DefinitionError(
                f"{location}: vd.{self.kind}({self.place!r}) has no {{partition_key}}, so that "
                'every partition would have the same rows; write filter="day = '
                "'{partition_key}'\", or leave partitions_def out"
            )
        for text in texts:
            check_placeholders(location, text, partitions_def)

    def url_for(self, partition_key: str | None) -> str:
        """Return the name of the table, and the partition's filter."""
        url, where = self.place, self.filter
        if partition_key is not None:
            url = fill_placeholders(url, partition_key)
            where = filled_filter(where, partition_key)
        return url if where is None else f"{url} where {where}"

    def schema(self, location: str) -> pa.Schema:
        """Return the columns of the table; those of a table for each partition are not known."""
        if PLACEHOLDER.search(self.place):
            return super().schema(location)
        return self.open_table(self.place, location).schema

    def bind(self, store: Store) -> Source:
        return replace(self, planned={})

    def for_workers(self) -> SourceReader:
        return replace(self, planned=None)

    @property
    def splitting(self) -> str:
        return "rows of a unit, 4"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the units of the version that may have rows of each partition."""
        bound = self if self.planned is not None else replace(self, planned={})

        def listed(key: str | None) -> Listed:
            where = filled_filter(self.filter, key)
            try:
                table = bound._table(key, location)
                return tuple(with_retries(lambda: table.units(where)))
            except VaneError as error:
                return SourceError(str(error))
            except Exception as error:  # drivers raise plain exceptions too
                fix = "Check the filter, the columns and the credentials, or compact the table"
                return unreadable(self.url_for(key), error, location, fix)

        # One partition of each table first, so that each table is opened once.
        firsts = {fill_placeholders(self.place, key): key for key in reversed(partitions)}
        in_threads(listed, firsts.values())
        units = in_threads(listed, partitions)
        for table in (bound.planned or {}).values():
            table.forget()
        return dict(zip(partitions, units))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        return SourceError(
            f"{location}: {self.url_for(partition)!r} has no rows. Check the filter, write the "
            f"partition first, or accept it with vd.{self.kind}(..., allow_empty=True)"
        )

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        table = self._table(partition, location)
        units = table.units(filled_filter(self.filter, partition))

        def pieces_of(file: FileRecord) -> Sequence[FragmentRecord]:
            def planned() -> Sequence[FragmentRecord]:
                return list(table.cut(file, units[file], rule))

            with self.read_errors(file.url, location):
                return with_retries(_failpoints.failing("read", file.url, planned))

        fragments = itertools.chain.from_iterable(in_threads(pieces_of, files))
        return SourceTable(table.schema, tuple(fragments))

    # Reading.

    @abstractmethod
    def read_rows(
        self, span: FileSpan, detail: Detail, schema: pa.Schema, location: str
    ) -> pa.Table:
        """Read rows by the library; those of a Parquet file by their positions in it."""

    def read(self, fragment: FragmentRecord, schema: pa.Schema, location: str) -> pa.Table:
        """Read the rows that are not deleted and pass the filter."""
        return pa.concat_tables(self._read(span, schema, location) for span in fragment.spans)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record of a data file unchanged."""
        listed_file(file.url, self)
        return file

    @contextmanager
    def read_errors(self, url: str, location: str) -> Iterator[None]:
        """Convert errors of libraries and file systems; a data file may be gone."""
        try:
            yield
        except Exception as error:  # drivers raise their own exception classes
            if isinstance(error, VaneError) and error.__cause__ is None:
                raise
            known = error if isinstance(error, VaneError) else unreadable(url, error, location)
            raise SourceError(
                f"{known}. If the file is missing, {self.cleanup} has deleted files of former "
                "versions: run the partition again, which reads the latest version, or name a "
                "version that the table still has; do not clean up versions that runs use"
            ) from error

    def _read(self, span: FileSpan, schema: pa.Schema, location: str) -> pa.Table:
        with self.read_errors(span.url, location):
            detail = json.loads(span.detail or "{}")
            if "live" not in detail:
                return self.read_rows(span, detail, schema, location)
            first, number, count, text = detail["live"]
            packed = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
            live = np.unpackbits(packed, count=count).astype(bool)
            every = replace(span, start=first, stop=first + count)
            table = unsliced(self.read_rows(every, detail, schema, location)).filter(pa.array(live))
            return table.slice(span.start - number, span.stop - span.start)

    def _table(self, partition: str | None, location: str) -> LakeTable:
        try:
            url = fill_placeholders(self.place, partition, key_in_path)
        except SourceError as error:
            raise SourceError(f"{location}: {error}") from None
        if self.planned is None:
            return self.open_table(url, location)
        if url not in self.planned:
            self.planned[url] = self.open_table(url, location)
        return self.planned[url]


@dataclass(frozen=True, kw_only=True)
class FolderSource(LakeSource):
    """The rows of a table that is a folder.

    Attributes:
        url: A local path or ``s3://`` URL, with placeholders for the partition's key.
        table_version: The version; None for the latest version.
        storage_options: Options of the fsspec file system; never part of a key.
    """

    url: str
    table_version: Version = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.storage_options

    @property
    def place(self) -> str:
        return self.url

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,)


def folder_arguments(
    where: str,
    url: str | os.PathLike[str],
    version: Version,
    storage_options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Validate the arguments that sources of tables in folders have."""
    url = absolute_url(checked_url(where, url))
    check_table_url(where, url, where.partition(".")[2].capitalize())
    options = storage_options or {}
    return {"url": url.rstrip("/"), "table_version": version, "storage_options": options}


def lake_arguments(
    where: str, filter: str | None, columns: Sequence[str] | None, asset: Any, allow_empty: bool
) -> dict[str, Any]:
    """Validate the arguments that all sources of tables have."""
    return {
        "filter": filter,
        "columns": list_of_names(where, "columns", columns),
        "asset": asset_path(asset, where),
        "allow_empty": allow_empty,
    }


def digest(value: Any) -> str:
    """Return a digest of bytes, or of a value that JSON can hold."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def cut_live(
    record: FileRecord, footer: pq.FileMetaData, live: Mask, rule: FragmentRule, detail: Detail
) -> Iterator[FragmentRecord]:
    """Cut a data file along its row groups, and number the rows that are left."""
    number = 0
    for piece in cut(SizedFile(record, row_groups(footer)), rule):
        mask, own = live[piece.start : piece.stop], dict(detail)
        count = int(np.sum(mask))
        if count < len(mask) or number < piece.start:
            packed = base64.b85encode(zlib.compress(np.packbits(mask).tobytes())).decode()
            own["live"] = [piece.start, number, len(mask), packed]
        if count:
            details = [json.dumps(own) if own else ""]
            size = piece.bytes * count // len(mask)
            yield fragment_record([(record, number, number + count)], size, details=details)
        number += count
