"""Versions of Delta tables, as deltalake plans them: data files, partition values, deleted rows.

Conditions of a filter on partition columns select files. The others apply to rows; deltalake skips
the files whose statistics exclude them.
"""

from __future__ import annotations

import base64
import datetime
import functools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import require_columns
from vane_dagster.errors import SourceError, first_line, names
from vane_dagster.sources.base import (
    FragmentRule,
    ReadContext,
    SourceReader,
    cleaned_up,
    fragment_record,
)
from vane_dagster.sources.lake_source import LakeTable, digest
from vane_dagster.sources.parquet import ROW_NUMBER, cut, read_footer
from vane_dagster.sources.parquet_scan import reading_detail, scan_projected
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import Location, shown_url
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.table_options import table_options
from vane_dagster.storage.transient_errors import with_retries
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.sql import bind, conjuncts, referenced_columns

VACUUM = "VACUUM"
_FEATURES = frozenset({
    "deletionVectors", "domainMetadata", "timestampNtz", "typeWidening", "typeWidening-preview",
    "v2Checkpoint", "vacuumProtocolCheck",
})  # fmt: skip
_COMPARABLE = (pa.types.is_integer, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
"""Types that deltalake compares as DuckDB does. It rounds constants for decimals: 1.499 is 1.50."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBER = re.compile(r"(?<![A-Za-z_])[0-9][0-9A-Za-z_.]*")
_QUOTED_KINDS = (pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
Version = int | str | datetime.datetime | None
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class DataFile:
    """A data file of a table, for one filter.

    Attributes:
        constants: The table's partition columns, each with the file's value as text.
        live: Which of its rows the deletion vector keeps; None for all.
        where: The conditions that its rows have to pass; empty if all do.
    """

    constants: Mapping[str, str | None]
    live: Mask | None
    where: str


@dataclass(frozen=True)
class LiveRows:
    """The rows at a range of positions in a data file, some of which are no rows of the partition.

    Attributes:
        first: The first position.
        start: Number of the first row.
        mask: Which positions hold rows: neither deleted nor filtered out.
    """

    first: int
    start: int
    mask: Mask

    def entry(self) -> list[Any]:
        """Return an entry of the detail of their span."""
        packed = zlib.compress(np.packbits(self.mask).tobytes())
        return [self.first, self.start, len(self.mask), base64.b85encode(packed).decode()]

    @classmethod
    def of(cls, span: FileSpan) -> LiveRows | None:
        """Read the detail of a span; None if rows and positions are the same."""
        entry = json.loads(span.detail).get("live") if span.detail else None
        if entry is None:
            return None
        first, start, count, text = entry
        packed = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
        return cls(first, start, np.unpackbits(packed, count=count).astype(bool))


class DeltaTable(LakeTable):
    """A version of a table.

    Args:
        place: The table's folder.
        table: The table at this version, of deltalake.
        columns: The columns to read; None for all.
        reader: The options of the table's file system.
        location: The pipeline, for messages.

    Raises:
        SourceError: If it cannot be read.
    """

    def __init__(
        self,
        place: Location,
        table: Any,
        columns: Sequence[str] | None,
        reader: SourceReader,
        location: str,
    ) -> None:
        super().__init__(location)
        self._place, self._table, self._reader = place, table, reader
        owner = f"{location}: Delta table {place.url!r}"
        _check_features(table, owner)
        self._all = plain_schema(pa.schema(table.schema().to_arrow()))
        if ROW_NUMBER in self._all.names:
            raise SourceError(
                f"{owner} has a column {ROW_NUMBER!r}, which is what the reader calls a row's "
                "place in its file; rename it"
            )
        require_columns(owner, columns or (), self._all.names, SourceError)
        wanted = self._all.names if columns is None else columns
        self.schema = pa.schema([self._all.field(name) for name in wanted])
        partitioned = table.metadata().partition_columns
        if binary := [n for n in partitioned if pa.types.is_binary(self._all.field(n).type)]:
            raise SourceError(
                f"{owner} is partitioned by {names(binary)}, of the type BINARY, which vd.delta "
                "cannot read. Partition the table by a text"
            )
        added = pa.table(table.get_add_actions())
        self._paths = added.column("path").to_pylist()
        self._sizes = added.column("size_bytes").to_pylist()
        values = added.column("partition").combine_chunks() if partitioned else None
        self._partition = pa.table(
            {n: pc.struct_field(values, n).cast(self._all.field(n).type) for n in partitioned}
        )
        self._constants = dict(zip(partitioned, map(_texts, self._partition.columns)))
        self._live = _live(table)

    @classmethod
    def open(
        cls,
        place: Location,
        version: Version,
        columns: Sequence[str] | None,
        reader: SourceReader,
        location: str,
    ) -> DeltaTable:
        """Load a version of a table.

        Args:
            place: The table's folder.
            version: A version number, or a time; None for the latest version.
            columns: The columns to read; None for all.
            reader: The options of the table's file system.
            location: The pipeline, for messages.

        Raises:
            SourceError: If there is no such table or version, or it cannot be read.
        """
        from deltalake.exceptions import TableNotFoundError

        what = f"{location}: Delta table {shown_url(place.url)}"
        try:
            table = with_retries(functools.partial(_opened, place, version))
            return cls(place, table, columns, reader, location)
        except SourceError:
            raise
        except TableNotFoundError as error:
            raise SourceError(
                f"{what} does not exist. Check the path, or write the table first"
            ) from error
        except Exception as error:  # the driver raises plain exceptions too
            if version is not None and (latest := _latest(place)) is not None:
                raise SourceError(
                    f"{what} has no version {version!r}: {first_line(error)}. The latest is "
                    f"{latest}; versions whose log was cleaned up are gone"
                ) from error
            raise SourceError(
                f"{what} cannot be read: {type(error).__name__}: {first_line(error)}. Check that "
                "the credentials reach it"
            ) from error

    def list_units(self, where: str | None) -> Iterator[tuple[FileRecord, DataFile]]:
        """List the data files that may have rows that pass a filter, sorted by URL.

        Args:
            where: The filter in SQL; None for all files.

        Raises:
            SchemaError: If the filter does not fit the table.
            DefinitionError: If the filter is not valid SQL.
        """
        location = f"{self.location}, filter of {self._place.url!r}"
        selected, of_rows = np.ones(len(self._paths), bool), []
        if where is not None:
            bind((), where, self._all, location)
        for condition in conjuncts(where, location) if where is not None else ():
            columns = {name.lower() for name in referenced_columns(condition, location)}
            if columns and columns <= {name.lower() for name in self._partition.column_names}:
                selected &= self._by_partition(condition)
            else:
                selected &= self._by_statistics(condition, columns)
                of_rows.append(condition)
        row_filter = " AND ".join(of_rows)
        read = [[each.name, str(each.type)] for each in (*self.schema, *self._tested(row_filter))]
        units = [self._unit(int(i), row_filter, read) for i in np.flatnonzero(selected)]
        yield from sorted(units, key=lambda unit: unit[0].url)

    def cut(
        self, record: FileRecord, unit: DataFile, rule: FragmentRule
    ) -> tuple[Sequence[FragmentRecord], Sequence[str]]:
        """Cut a data file along its row groups; filtered rows are counted by reading them."""
        try:
            found, footer = read_footer(record, self._reader, self.location)
        except SourceError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                version = f"version {self._table.version()} of Delta table {self._place.url!r}"
                raise cleaned_up(record.url, version, VACUUM, self.location) from error
            raise
        own = plain_schema(found)
        needed = pa.schema({f.name: f for f in [*self.schema, *self._tested(unit.where)]}.values())
        lacking = [name for name in needed.names if name not in own.names]
        lower = {name.lower(): name for name in own.names}
        if wrong := [name for name in lacking if name.lower() in lower]:
            raise SourceError(
                f"{self.location}: data file {record.url!r} has a column "
                f"{lower[wrong[0].lower()]!r}, and its table {wrong[0]!r}; rewrite the file with "
                "the table's name"
            )
        cast = [f.name for f in needed if f.name in own.names and own.field(f.name).type != f.type]
        constants = {name: unit.constants.get(name) for name in lacking}
        detail = reading_detail(cast, constants)
        absent = [name for name in lacking if name not in unit.constants]
        pieces = list(cut(record, footer, rule, detail=detail))
        if unit.live is None and not unit.where:
            return pieces, absent
        live = np.ones(footer.num_rows, bool) if unit.live is None else unit.live
        if unit.where:
            every = FileSpan(record.url, 0, footer.num_rows, detail)
            live = live & self._passing(every, unit.where, footer.num_rows)
        fragments: list[FragmentRecord] = []
        start = 0
        for piece in pieces:
            rows = LiveRows(piece.start, start, live[piece.start : piece.stop])
            if count := int(np.sum(rows.mask)):
                details = [reading_detail(cast, constants, live=rows.entry())]
                spans = [(record, start, start + count)]
                fragments.append(fragment_record(spans, piece.bytes, details=details))
            start += count
        return fragments, absent

    def _by_partition(self, condition: str) -> Mask:
        """Return which files pass a condition on partition columns."""
        with shared().cursor() as cursor:
            cursor.register("source", self._partition)
            passed = cursor.sql(f"SELECT ({condition})::BOOLEAN AS x FROM source").to_arrow_table()
        return np.asarray(passed.column("x").fill_null(False), bool)

    def _by_statistics(self, condition: str, columns: set[str]) -> Mask:
        """Return which files may have rows that pass: all if deltalake cannot tell."""
        every = np.ones(len(self._paths), bool)
        kinds = [field.type for field in self._all if field.name.lower() in columns]
        if not _is_comparable(condition, kinds):
            return every
        selected = np.zeros(len(self._paths), bool)
        try:
            found = self._table.file_uris(file_pruning_predicate=condition)
            selected[[self._indexes[uri] for uri in found]] = True
        except Exception:  # the driver raises plain exceptions too; rows are filtered anyway
            return every
        return selected

    @functools.cached_property
    def _indexes(self) -> Mapping[str, int]:
        """The indexes of the data files by the URIs that deltalake gives them."""
        root = self._table.table_uri.removeprefix("file://")
        paths = enumerate(map(unquote, self._paths))
        return {path if "://" in path else f"{root}{path}": index for index, path in paths}

    def _tested(self, where: str) -> list[pa.Field]:
        """Return the columns of a filter."""
        columns = {name.lower() for name in referenced_columns(where, "filter")} if where else ()
        return [field for field in self._all if field.name.lower() in columns]

    def _passing(self, every: FileSpan, where: str, rows: int) -> Mask:
        """Return which rows of a file pass a filter."""
        row, schema = [("row", ROW_NUMBER)], pa.schema(self._tested(where))
        context = ReadContext(self.location, shared().cursor)
        options = self._reader.options_for(every.url)
        passed = scan_projected(every, schema, row, where, options, context)
        mask = np.zeros(rows, bool)
        mask[passed.column("row").to_numpy()] = True
        return mask

    def _unit(self, index: int, where: str, read: list[list[str]]) -> tuple[FileRecord, DataFile]:
        path = self._paths[index]
        live = self._live.get(path)
        constants = {name: values[index] for name, values in self._constants.items()}
        version = digest([read, where, constants, live is not None and digest(live.tobytes())])
        record = FileRecord(self._file_url(path), self._sizes[index], version)
        return record, DataFile(constants, live, where)

    def _file_url(self, path: str) -> str:
        """Return the URL of a data file, whose path in the log is percent-encoded."""
        decoded = unquote(path)
        if "://" in decoded:  # a clone names the files of another table
            return decoded
        return str(self._place.fs.unstrip_protocol(self._place.file(decoded)))


def _is_comparable(condition: str, kinds: Sequence[pa.DataType]) -> bool:
    """Return whether deltalake compares columns with the constants of a condition as SQL does.

    It converts a constant to the type of the column: it takes dec > 1.499 for dec > 1.50.
    """
    numbers = _NUMBER.findall(_QUOTED.sub("", condition))
    if all(map(pa.types.is_integer, kinds)):
        return "'" not in condition and all(map(str.isdigit, numbers))
    return not numbers and all(any(is_kind(kind) for is_kind in _QUOTED_KINDS) for kind in kinds)


def _opened(place: Location, version: Version) -> Any:
    import deltalake

    options = None if place.is_local else table_options(place)
    url = place.path if place.is_local else place.url
    if version is None or isinstance(version, int):
        return deltalake.DeltaTable(url, version=version, storage_options=options)
    table = deltalake.DeltaTable(url, storage_options=options)
    table.load_as_version(version)
    return table


def _latest(place: Location) -> int | None:
    """Return the latest version of a table; None if it cannot be opened."""
    try:
        return int(_opened(place, None).version())
    except Exception:  # the driver raises plain exceptions too
        return None


def _check_features(table: Any, what: str) -> None:
    """Refuse a table whose data files cannot be read as Parquet files with the table's columns."""
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        raise SourceError(
            f"{what} has column mapping, and its files have other column names. Rewrite it without "
            "column mapping, for example as a copy"
        )
    features = set(table.protocol().reader_features or ())
    if unknown := sorted(features - _FEATURES - {"columnMapping"}):
        raise SourceError(
            f"{what} uses {names(unknown)}, which vd.delta cannot read. Write the table without "
            "these features, for example as a copy"
        )


def _texts(values: pa.ChunkedArray) -> list[str | None]:
    """Return values as texts that Arrow and SQL cast to their type."""
    kind = values.type
    if pa.types.is_timestamp(kind) and kind.tz:
        texts = values.cast(pa.timestamp(kind.unit)).cast(pa.string())
        return [None if text is None else f"{text}Z" for text in texts.to_pylist()]
    found: list[str | None] = values.cast(pa.string()).to_pylist()
    return found


def _live(table: Any) -> dict[str, Mask]:
    """Return which rows deletion vectors keep, by the path of the data file."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    root, found = table.table_uri, {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for path, kept in zip(batch.column("filepath"), batch.column("selection_vector")):
            live = kept.values.to_numpy(zero_copy_only=False)
            found[path.as_py().removeprefix(root)] = live
    return found
