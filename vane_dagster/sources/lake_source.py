"""`LakeSource`: rows of a table at a version, which the library of the table's format plans.

The library lists the version's data files, selects those that may have rows of a partition, and
applies deletes and changes of the schema. A unit of it is one file, or one fragment, of the table.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import (
    PLACEHOLDER,
    check_placeholders,
    fill_placeholders,
    filled_filter,
    list_of_names,
)
from vane_dagster.errors import DefinitionError, SourceError, VaneError, names
from vane_dagster.sources.base import FragmentRule, Listed, Source, SourceTable, fragment_record
from vane_dagster.sources.file_source import asset_path, key_in_path
from vane_dagster.storage.filesystem import IO_THREADS
from vane_dagster.storage.manifest import FileRecord, FragmentRecord

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store

Units = Mapping[tuple[str, str], tuple[FileRecord, Any]]
"""Units by the URL and version of their record, each with what its table needs to cut it."""


class LakeTable(ABC):
    """A table at one version, as a run plans it.

    Args:
        location: The pipeline, for messages.

    Attributes:
        schema: The columns to read, with their types.
    """

    schema: pa.Schema

    def __init__(self, location: str) -> None:
        self.location = location
        self._units: dict[str | None, Units] = {}

    def units(self, where: str | None) -> Units:
        """Return the units that may have rows that pass a filter, listed once.

        Args:
            where: The filter; None for all rows.

        Raises:
            SourceError: If they cannot be listed.
        """
        if where not in self._units:
            found = self.list_units(where)
            self._units[where] = {(record.url, record.version): (record, u) for record, u in found}
        return self._units[where]

    @abstractmethod
    def list_units(self, where: str | None) -> Iterable[tuple[FileRecord, Any]]:
        """List the units that may have rows that pass a filter, in the order of their rows."""

    @abstractmethod
    def cut(
        self, record: FileRecord, unit: Any, rule: FragmentRule
    ) -> tuple[Sequence[FragmentRecord], Sequence[str]]:
        """Cut a unit into fragments; return them, and the columns that it lacks."""


@dataclass(frozen=True, kw_only=True)
class LakeSource(Source):
    """The rows of a table, at one version or at the latest one of each run.

    Attributes:
        filter: A row filter, with placeholders for the partition's key.
        columns: The columns to read; None for all.
        asset: Key of the Dagster asset that writes the table, as "a/b", if there is one.
        allow_empty: Whether a partition without rows is accepted.
        planned: The tables of a run, by URL, once the source is bound to a store.
    """

    function: ClassVar[str]
    filter: str | None = None
    columns: tuple[str, ...] | None = None
    asset: str | None = None
    allow_empty: bool = False
    planned: dict[str, LakeTable] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @abstractmethod
    def open_table(self, url: str, location: str) -> LakeTable:
        """Open the version to read of a table.

        Args:
            url: The table.
            location: The pipeline, for messages.

        Raises:
            SourceError: If there is no such table or version.
        """

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        texts = [each for each in (self.place, self.filter or "") if PLACEHOLDER.search(each)]
        if partitions_def is not None and not texts:
            raise DefinitionError(
                f"{location}: {self.function}({self.place!r}) has no {{partition_key}}, so that "
                'every partition would have the same rows; write filter="day = '
                "'{partition_key}'\", or leave partitions_def out"
            )
        for text in texts:
            check_placeholders(location, text, partitions_def)

    def describe(self) -> str:
        return f"{self.kind.capitalize()} table {self.place}"

    def url_for(self, partition_key: str | None) -> str:
        """Return the name of the table, and the partition's filter."""
        url, where = self.place, self.filter
        if partition_key is not None:
            url = fill_placeholders(url, partition_key)
            where = filled_filter(where, partition_key)
        return url if where is None else f"{url} where {where}"

    def schema(self, location: str) -> pa.Schema:
        if PLACEHOLDER.search(self.place):
            return super().schema(location)
        return self.open_table(self.place, location).schema

    def bind(self, store: Store) -> Source:
        return self._bound()

    @property
    def splitting(self) -> str:
        return "rows of a unit, 2"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the units of the version that may have rows of each partition.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.
        """
        bound = self if self.planned is not None else self._bound()

        def listed(key: str | None) -> Listed:
            try:
                units = bound._table(key, location).units(filled_filter(self.filter, key))
                return tuple(record for record, _ in units.values())
            except SourceError as error:
                return error
            except VaneError as error:
                return SourceError(str(error))

        # One partition of each table first, so that each table is opened once.
        firsts = {fill_placeholders(self.place, key): key for key in reversed(partitions)}
        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            list(threads.map(listed, firsts.values()))
            return dict(zip(partitions, threads.map(listed, partitions)))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        if self.allow_empty:
            return None
        return SourceError(
            f"{location}: {self.url_for(partition)!r} has no rows. Check the filter, write the "
            f"partition first, or accept it with {self.function}(..., allow_empty=True)"
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
        if gone := [file.url for file in files if (file.url, file.version) not in units]:
            raise SourceError(
                f"{location}: table {self.place!r} was changed while the run was planned, so that "
                f"{names(gone)} is no longer in it. Run the partition again"
            )
        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            cut = [units[file.url, file.version][1] for file in files]
            pieces = list(threads.map(table.cut, files, cut, itertools.repeat(rule)))
        partial: dict[str, list[str]] = {}
        for file, (_, lacking) in zip(files, pieces):
            for name in lacking:
                partial.setdefault(name, []).append(file.url)
        fragments = itertools.chain.from_iterable(each for each, _ in pieces)
        return SourceTable(table.schema, tuple(fragments), partial)

    def _bound(self) -> LakeSource:
        bound = replace(self)
        object.__setattr__(bound, "planned", {})
        return bound

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


def lake_arguments(
    where: str, filter: str | None, columns: Sequence[str] | None, asset: Any, allow_empty: bool
) -> dict[str, Any]:
    """Validate the arguments that all sources of tables have.

    Args:
        where: The function, for messages.
        filter: The row filter.
        columns: The columns to read.
        asset: The Dagster asset that writes the table.
        allow_empty: Whether a partition without rows is accepted.

    Raises:
        DefinitionError: If one has another form.
    """
    if filter is not None and not (isinstance(filter, str) and filter.strip()):
        raise DefinitionError(
            f'{where}: filter is {filter!r}; expected a row filter as text, as "n > 3"'
        )
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


def cut_evenly(
    record: FileRecord, start: int, rows: int, size: int, rule: FragmentRule, detail: str
) -> Iterator[FragmentRecord]:
    """Cut rows of a unit into fragments of about the same number of rows.

    Args:
        record: The unit's record.
        start: Number of the first row in the unit.
        rows: The number of rows.
        size: Their estimated bytes in memory.
        rule: The maximum size of a fragment.
        detail: What is needed to read them, for all fragments.
    """
    ranges = rule.cut(rows, size)
    for first, stop in ranges:
        span = (record, start + first, start + stop)
        yield fragment_record([span], size // len(ranges), details=[detail])
