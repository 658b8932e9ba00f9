"""Versions of Delta tables: the data files that may have rows of a partition.

Conditions of a filter on partition columns are evaluated for each file. Of the other conditions, a
comparison with constants skips the files whose statistics exclude it; they then apply to rows.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._keywords import require_columns
from vane_dagster.errors import DefinitionError, SourceError, first_line, names
from vane_dagster.sources.base import cleaned_up
from vane_dagster.sources.delta_scan import VACUUM, Positions, RowFilter
from vane_dagster.sources.parquet import ROW_NUMBER
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import Location, shown_url
from vane_dagster.storage.manifest import FileRecord
from vane_dagster.storage.table_options import table_options
from vane_dagster.storage.transient_errors import with_retries
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.sql import bind, conjuncts, range_test, referenced_columns

_FEATURES = frozenset({
    "deletionVectors", "domainMetadata", "timestampNtz", "typeWidening", "typeWidening-preview",
    "v2Checkpoint", "vacuumProtocolCheck",
})  # fmt: skip
_PROTOCOL = re.compile(r"(?:(file|s3|s3a)://)?(?![A-Za-z][A-Za-z0-9+.\-]*://)")
_MISREAD = re.compile(r"[%\\?#]")
_COMPARABLE = (pa.types.is_integer, pa.types.is_date, pa.types.is_timestamp, pa.types.is_decimal)
_NO_POSITIONS = np.array([], np.int64)


@dataclass(frozen=True)
class DataFile:
    """A data file of a table, for one partition of a pipeline.

    Attributes:
        record: Its record; the version is a digest of all that its rows follow from.
        constants: The table's partition columns, each with the file's value as text.
        deleted: The deleted positions.
        filter: The filter; None if all rows of the file pass it.
    """

    record: FileRecord
    constants: Mapping[str, str | None]
    deleted: Positions
    filter: RowFilter | None


class DeltaVersion:
    """A version of a table.

    Args:
        location: The table's folder.
        table: The table at this version, of deltalake.
        columns: The columns to read; None for all.
        where: The pipeline, for messages.

    Attributes:
        url: The table's URL.
        schema: The columns to read.

    Raises:
        SourceError: If it cannot be read.
    """

    def __init__(
        self, location: Location, table: Any, columns: Sequence[str] | None, where: str
    ) -> None:
        self._location = location
        self.url = location.url
        self._number = int(table.version())
        _check_features(table, f"{where}: Delta table {self.url!r}")
        self._all = plain_schema(pa.schema(table.schema().to_arrow()))
        if ROW_NUMBER in self._all.names:
            raise SourceError(
                f"{where}: Delta table {self.url!r} has a column {ROW_NUMBER!r}, which is what the "
                "reader calls a row's place in its file; rename it"
            )
        owner = f"{where}: Delta table {self.url!r}"
        require_columns(owner, columns or (), self._all.names, SourceError)
        wanted = self._all.names if columns is None else columns
        self.schema = pa.schema([self._all.field(name) for name in wanted])
        if binary := [
            name
            for name in table.metadata().partition_columns
            if pa.types.is_binary(self._all.field(name).type)
        ]:
            raise SourceError(
                f"{where}: Delta table {self.url!r} is partitioned by {names(binary)}, of the type "
                "BINARY, which vd.delta cannot read. Partition the table by a text"
            )
        added = pa.table(table.get_add_actions())
        self._paths = added.column("path").to_pylist()
        self._sizes = added.column("size_bytes").to_pylist()
        self._low = _fields(added, "min")
        self._high = _fields(added, "max")
        self._partition = {
            name: values.cast(self._all.field(name).type)
            for name, values in _fields(added, "partition").items()
        }
        self._constants = {name: _texts(values) for name, values in self._partition.items()}
        self._deleted = _deleted(table)
        self._listed: dict[str | None, tuple[DataFile, ...]] = {}

    @classmethod
    def open(
        cls,
        location: Location,
        version: int | str | datetime.datetime | None,
        columns: Sequence[str] | None,
        where: str,
    ) -> DeltaVersion:
        """Load a version of a table.

        Args:
            location: The table's folder.
            version: A version number, or a time; None for the latest version.
            columns: The columns to read; None for all.
            where: The pipeline, for messages.

        Raises:
            SourceError: If there is no such table or version, or it cannot be read.
        """
        from deltalake.exceptions import TableNotFoundError

        what = f"{where}: Delta table {shown_url(location.url)}"
        try:
            table = with_retries(functools.partial(_opened, location, version))
            return cls(location, table, columns, where)
        except SourceError:
            raise
        except TableNotFoundError as error:
            raise SourceError(
                f"{what} does not exist. Check the path, or write the table first"
            ) from error
        except Exception as error:  # the driver raises plain exceptions too
            if version is not None and (latest := _latest(location)) is not None:
                raise SourceError(
                    f"{what} has no version {version!r}: {first_line(error)}. The latest is "
                    f"{latest}; versions whose log was cleaned up are gone"
                ) from error
            raise SourceError(
                f"{what} cannot be read: {type(error).__name__}: {first_line(error)}. Check that "
                "the credentials reach it"
            ) from error

    @staticmethod
    def check_url(where: str, url: str) -> None:
        """Verify that deltalake can open a URL.

        Args:
            where: The caller, for messages.
            url: The URL.

        Raises:
            DefinitionError: If it cannot.
        """
        if not _PROTOCOL.match(url):
            raise DefinitionError(
                f"{where}: {url!r} cannot be a Delta table; expected a local path or s3://"
            )
        if found := _MISREAD.search(url):
            raise DefinitionError(
                f"{where}: {url!r} holds {found.group()!r}, which Delta's driver takes for a part "
                "of a URL; give the table another name"
            )

    def files(self, text: str | None, where: str) -> tuple[DataFile, ...]:
        """Return the data files that may have rows that pass a filter, sorted by URL.

        Args:
            text: The filter; None for all files.
            where: The pipeline, for messages.

        Raises:
            SchemaError: If the filter does not fit the table.
            DefinitionError: If the filter is not valid SQL.
        """
        if text not in self._listed:
            found = sorted(self._selected(text, where), key=lambda file: file.record.url)
            self._listed[text] = tuple(found)
        return self._listed[text]

    def check_columns(self, own: pa.Schema, url: str, where: str) -> None:
        """Verify that a data file has the names of the table's columns in the same case.

        Args:
            own: The file's columns.
            url: The file.
            where: The pipeline, for messages.

        Raises:
            SourceError: If a name differs in case.
        """
        known = {name.lower(): name for name in self._all.names}
        for name in own.names:
            if known.get(name.lower(), name) != name:
                raise SourceError(
                    f"{where}: data file {url!r} has a column {name!r}, and its table "
                    f"{known[name.lower()]!r}; rewrite the file with the table's name"
                )

    def vacuumed(self, url: str, where: str) -> SourceError:
        """Return the error for a data file that is gone.

        Args:
            url: The file.
            where: The pipeline, for messages.
        """
        version = f"version {self._number} of Delta table {self.url!r}"
        return cleaned_up(url, version, VACUUM, where)

    def _selected(self, text: str | None, where: str) -> Iterator[DataFile]:
        selected = np.ones(len(self._paths), bool)
        of_rows: list[str] = []
        wanted: set[str] = set()
        location = f"{where}, filter of {self.url!r}"
        if text is not None:
            bind((), text, self._all, location)
        for conjunct in conjuncts(text, location) if text is not None else ():
            named = {name.lower() for name in referenced_columns(conjunct, location)}
            if named and named <= {name.lower() for name in self._partition}:
                passed = _evaluated(conjunct, pa.table(self._partition))
                selected &= np.asarray(passed.fill_null(False), bool)
            else:
                of_rows.append(conjunct)
                wanted |= named
                selected &= self._may_hold(conjunct, location)
        row_filter = None
        if of_rows:
            columns = [column for column in self._all if column.name.lower() in wanted]
            row_filter = RowFilter(" AND ".join(of_rows), pa.schema(columns))
        for index in np.flatnonzero(selected):
            yield self._file(int(index), row_filter)

    def _may_hold(self, conjunct: str, location: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which files may have rows that pass a condition, by their statistics."""
        every = np.ones(len(self._paths), bool)
        test = range_test(conjunct, location)
        if test is None:
            return every
        column, expression, constants = test
        (name,) = [each for each in self._all.names if each.lower() == column.lower()] or [column]
        low, high = self._low.get(name), self._high.get(name)
        if low is None or high is None or not len(low):
            return every
        kind = low.type
        if pa.types.is_timestamp(kind):  # statistics are cut to milliseconds
            high = pc.add(high, pa.scalar(datetime.timedelta(milliseconds=1)))
        elif pa.types.is_string(kind):
            # SQL compares other constants as numbers, whose order is another one.
            texts = " AND ".join(f"typeof({each}) = 'VARCHAR'" for each in constants)
            expression = f"NOT ({texts}) OR {expression}"
        elif not any(is_kind(kind) for is_kind in _COMPARABLE):
            return every
        try:
            found = _evaluated(expression, pa.table({"low": low, "high": high}))
        except duckdb.Error:  # the statistics decide nothing; the filter itself may still fit
            return every
        return np.asarray(found.fill_null(True), bool)

    def _file(self, index: int, row_filter: RowFilter | None) -> DataFile:
        path = self._paths[index]
        deleted = self._deleted.get(path, _NO_POSITIONS)
        constants = {name: values[index] for name, values in self._constants.items()}
        version = [
            [(column.name, str(column.type)) for column in self.schema],
            constants,
            hashlib.blake2b(deleted.tobytes(), digest_size=16).hexdigest() if len(deleted) else "",
            [row_filter.text, str(row_filter.columns)] if row_filter else None,
        ]
        digest = hashlib.blake2b(json.dumps(version).encode(), digest_size=16).hexdigest()
        record = FileRecord(self._file_url(path), self._sizes[index], digest)
        return DataFile(record, constants, deleted, row_filter)

    def _file_url(self, path: str) -> str:
        """Return the URL of a data file, whose path in the log is percent-encoded."""
        decoded = unquote(path)
        if "://" in decoded:  # a clone names the files of another table
            return decoded
        location = self._location
        return str(location.fs.unstrip_protocol(location.file(decoded)))


def _opened(location: Location, version: int | str | datetime.datetime | None) -> Any:
    from deltalake import DeltaTable

    is_local = location.is_local
    options = None if is_local else table_options(location)
    url = location.path if is_local else location.url
    if version is None or isinstance(version, int):
        return DeltaTable(url, version=version, storage_options=options)
    table = DeltaTable(url, storage_options=options)
    table.load_as_version(version)
    return table


def _latest(location: Location) -> int | None:
    """Return the latest version of a table; None if it cannot be opened."""
    try:
        return int(_opened(location, None).version())
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


def _fields(added: pa.Table, name: str) -> dict[str, pa.Array]:
    """Return the fields of a column of structs; none if there is no such column."""
    index = added.schema.get_field_index(name)
    if index < 0:
        return {}
    values = added.column(index).combine_chunks()
    kind = added.schema.field(index).type
    return {kind.field(i).name: pc.struct_field(values, i) for i in range(kind.num_fields)}


def _texts(values: pa.Array) -> list[str | None]:
    """Return values as texts that Arrow and SQL cast to their type."""
    kind = values.type
    if pa.types.is_timestamp(kind) and kind.tz:
        texts = values.cast(pa.timestamp(kind.unit)).cast(pa.string())
        return [None if text is None else f"{text}Z" for text in texts.to_pylist()]
    found: list[str | None] = values.cast(pa.string()).to_pylist()
    return found


def _deleted(table: Any) -> dict[str, Positions]:
    """Return the positions that deletion vectors delete, by the path of the data file."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    root, found = table.table_uri, {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for path, kept in zip(batch.column("filepath"), batch.column("selection_vector")):
            live = kept.values.to_numpy(zero_copy_only=False)
            found[path.as_py().removeprefix(root)] = np.flatnonzero(~live)
    return found


def _evaluated(expression: str, rows: pa.Table) -> pa.Array:
    """Return the value of a condition for each row."""
    with shared().cursor() as cursor:
        cursor.register("source", rows)
        table = cursor.sql(f"SELECT ({expression})::BOOLEAN AS x FROM source").to_arrow_table()
    return table.column("x").combine_chunks()
