"""Versions of Delta tables, as deltalake plans them: data files, partition values, deleted rows.

Conditions of a filter on partition columns select files. The others apply to rows; deltalake skips
the files whose statistics exclude them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vane_dagster._keywords import require_columns
from vane_dagster.errors import SourceError, names
from vane_dagster.sources.base import FragmentRule
from vane_dagster.sources.lake_source import LakeTable, Mask, cut_live, digest
from vane_dagster.sources.parquet_scan import opened
from vane_dagster.sources.schemas import conform, plain_schema
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.schema import check_column_names
from vane_dagster.types.sql import bind, conjuncts, referenced_columns

_FEATURES = frozenset({
    "deletionVectors", "domainMetadata", "timestampNtz", "typeWidening", "typeWidening-preview",
    "v2Checkpoint", "vacuumProtocolCheck",
})  # fmt: skip

_COMPUTING = re.compile(r"[/^*%&|~#@]|\b(?!(?:in|and|or|not)\b)\w+\s*\(", re.IGNORECASE)
"""Operators and functions, in a condition without its texts."""


class DataFile(NamedTuple):
    """A data file of a table, for one filter.

    Attributes:
        constants: The partition columns that are read, each with the file's value as text.
        live: Which of its rows the deletion vector keeps; None for all.
        where: The conditions that its rows have to pass; empty if all do.
    """

    constants: Mapping[str, str | None]
    live: Mask | None
    where: str


class DeltaTable(LakeTable):
    """A version of a table."""

    def __init__(self, source: Any, location: str, table: Any, name: str) -> None:
        super().__init__(source, location, table, name)
        owner, columns = self._owner, source.columns
        self._place = StoragePath(name, source.storage_options)
        _check_features(table, owner)
        self._all = plain_schema(pa.schema(table.schema().to_arrow()))
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
        self._urls = list(map(self._url, self._paths))
        self._sizes = added.column("size_bytes").to_pylist()
        values = added.column("partition").combine_chunks() if partitioned else None
        self._partition = pa.table(
            {n: pc.struct_field(values, n).cast(self._all.field(n).type) for n in partitioned}
        )
        texts = [values.cast(pa.string()).to_pylist() for values in self._partition.columns]
        self._constants = dict(zip(partitioned, texts))
        self._live = _live(table)
        if unknown := self._live.keys() - set(map(unquote, self._paths)):
            raise SourceError(
                f"{owner} has deletion vectors of files that it does not list: {names(unknown, 3)}"
            )

    def list_units(self, where: str | None) -> Iterator[tuple[FileRecord, DataFile]]:
        """List the data files that may have rows that pass a filter, sorted by URL."""
        location = f"{self.location}, filter of {self._place.url!r}"
        selected, of_rows = np.ones(len(self._paths), bool), []
        if where is not None:
            bind((), where, self._all, location)
        for condition in conjuncts(where, location) if where is not None else ():
            columns = {name.lower() for name in referenced_columns(condition, location)}
            if columns and columns <= {name.lower() for name in self._partition.column_names}:
                selected &= _where(self._partition, condition)
            else:
                selected &= self._by_statistics(condition, columns)
                of_rows.append(condition)
        row_filter = " AND ".join(of_rows)
        read = [[each.name, str(each.type)] for each in (*self.schema, *self._tested(row_filter))]
        units = [self._unit(int(i), row_filter, read) for i in np.flatnonzero(selected)]
        yield from sorted(units, key=lambda unit: unit[0].url)

    def cut(
        self, record: FileRecord, unit: DataFile, rule: FragmentRule
    ) -> Iterator[FragmentRecord]:
        """Cut a data file along its row groups; filtered rows are counted by reading them."""
        needed = {each.name for each in (*self.schema, *self._tested(unit.where))}
        with opened(StoragePath(record.url, self._source.storage_options)) as file:
            own = file.schema_arrow.names
            absent = needed.difference(own, unit.constants)
            check_column_names([*own, *absent], f"{self.location}, {record.url!r}")
            live = np.ones(file.metadata.num_rows, bool) if unit.live is None else unit.live
            if unit.where:
                live = live & self._passing(file, unit)
            yield from cut_live(record, file.metadata, live, rule, {"constants": unit.constants})

    def _by_statistics(self, condition: str, columns: set[str]) -> Mask:
        """Return which files may have rows that pass: all if deltalake cannot tell."""
        every = np.ones(len(self._paths), bool)
        kinds = [field.type for field in self._all if field.name.lower() in columns]
        if not _is_comparable(condition, kinds):
            return every
        try:
            uris = self._table.file_uris(file_pruning_predicate=condition)
        except Exception:  # the driver raises plain exceptions too; rows are filtered anyway
            return every
        urls = {self._place.fs.unstrip_protocol(uri) for uri in uris}
        selected = np.array([url in urls for url in self._urls], bool)
        return selected if np.sum(selected) == len(uris) else every  # every URL is known

    def _tested(self, where: str) -> list[pa.Field]:
        """Return the columns of a filter."""
        columns = {name.lower() for name in referenced_columns(where, "filter")} if where else ()
        return [field for field in self._all if field.name.lower() in columns]

    def _passing(self, file: pq.ParquetFile, unit: DataFile) -> Mask:
        """Return which rows of a file pass a filter."""
        schema, own = pa.schema(self._tested(unit.where)), {*file.schema_arrow.names}
        names = [name for name in schema.names if name in own and name not in unit.constants]
        batches = file.iter_batches(columns=names, use_threads=False)
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        masks = [_where(conform(rows, schema, unit.constants), unit.where) for rows in tables]
        return np.concatenate([np.zeros(0, bool), *masks])

    def _unit(self, index: int, where: str, read: list[list[str]]) -> tuple[FileRecord, DataFile]:
        path, names = self._paths[index], {name for name, _ in read}
        live = self._live.get(unquote(path))
        constants = {name: v[index] for name, v in self._constants.items() if name in names}
        version = digest([read, where, constants, live is not None and digest(live.tobytes())])
        record = FileRecord(self._urls[index], self._sizes[index], version)
        return record, DataFile(constants, live, where)

    def _url(self, path: str) -> str:
        """Return the URL of a data file, whose path in the log is percent-encoded."""
        decoded = unquote(path)
        if "://" in decoded:  # a clone names the files of another table
            return decoded
        return str(self._place.fs.unstrip_protocol(self._place.file(decoded)))


def _where(table: pa.Table, condition: str) -> Mask:
    """Return which rows of a table pass a condition in SQL."""
    numbered = table.append_column("__row", pa.array(np.arange(table.num_rows)))
    with shared().cursor() as cursor:
        cursor.register("source", numbered)
        passed = cursor.sql(f"SELECT ({condition})::BOOLEAN AS x FROM source").to_arrow_table()
    return np.asarray(passed.column("x").fill_null(False), bool)


def _is_comparable(condition: str, kinds: Sequence[pa.DataType]) -> bool:
    """Return whether deltalake compares columns with the constants of a condition as SQL does.

    It converts a constant to the type of the column: it takes dec > 1.499 for dec > 1.50. Its
    arithmetic and its functions are others: 5 / 2 is 2.
    """
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", condition)
    if _COMPUTING.search(unquoted):
        return False
    numbers = re.findall(r"(?<![A-Za-z_])[0-9][0-9A-Za-z_.]*", unquoted)
    if all(map(pa.types.is_integer, kinds)):
        return "'" not in condition and all(map(str.isdigit, numbers))
    quoted = (pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
    return not numbers and all(any(is_kind(kind) for is_kind in quoted) for kind in kinds)


def _check_features(table: Any, what: str) -> None:
    """Refuse a table whose data files cannot be read as Parquet files with the table's columns."""
    unknown = set(table.protocol().reader_features or ()) - _FEATURES - {"columnMapping"}
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        unknown.add("columnMapping")
    if unknown:
        raise SourceError(
            f"{what} uses {names(sorted(unknown))}, which vd.delta cannot read. Write the table "
            "without these features, for example as a copy"
        )


def _live(table: Any) -> dict[str, Mask]:
    """Return which rows deletion vectors keep, by the path of the data file."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    root, masks = table.table_uri, {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for path, kept in zip(batch.column("filepath"), batch.column("selection_vector")):
            live = kept.values.to_numpy(zero_copy_only=False)
            masks[unquote(path.as_py()).removeprefix(unquote(root))] = live
    return masks
