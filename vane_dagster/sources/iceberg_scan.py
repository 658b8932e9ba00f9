"""Reads of Iceberg data files in a worker: deletes, the filter and schema evolution are applied.

Positions in a data file that has deletes or a filter differ from the numbers of its rows: the
detail of a span says which positions hold the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster import _failpoints
from vane_dagster._secrets import revealed
from vane_dagster.errors import SourceError
from vane_dagster.sources.base import ReadContext, SourceReader, cleaned_up, unreadable
from vane_dagster.storage.iceberg_catalog import IcebergCatalog, iceberg_errors
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.transient_errors import with_retries

_REFRESH_SECONDS = 300.0
"""A catalog may lend credentials that expire: workers load the table again after this time."""
_KEPT_DELETES = 16
Positions = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
_read: dict[str, Mapping[str, Positions]] = {}
_loaded: dict[tuple[str, str, str], tuple[float, Any]] = {}


@dataclass(frozen=True)
class FileDetail:
    """What is needed to read rows of a data file, as the `detail` of their span.

    Attributes:
        snapshot: The snapshot in which the file was planned.
        schema: The schema by which the file is read; None for the table's current one.
        start: Number of the first row at `positions`.
        positions: First position of the rows in the file, and the position after the last, if
            deletes or a filter apply. Otherwise rows and positions are the same.
        deletes: Path and format of each file of position deletes or deletion vectors.
        filter: The row filter; None if all rows of the file pass it.
        constants: Partition values by field id, in Iceberg's binary form as hex digits. They are
            the values of columns that the file lacks.
    """

    snapshot: int | None = None
    schema: int | None = None
    start: int = 0
    positions: tuple[int, int] | None = None
    deletes: Sequence[tuple[str, str]] = ()
    filter: str | None = None
    constants: Mapping[str, str] = field(default_factory=dict)

    def dumps(self) -> str:
        """Convert to JSON, without the fields that have their default."""
        defaults = vars(FileDetail())
        return json.dumps({n: v for n, v in vars(self).items() if v != defaults[n]})

    @classmethod
    def loads(cls, text: str) -> FileDetail:
        """Read what `dumps` wrote; an empty text is a file without deletes."""
        found = json.loads(text) if text else {}
        if "positions" in found:
            found["positions"] = tuple(found["positions"])
        return cls(**{**found, "deletes": tuple(map(tuple, found.get("deletes", ())))})


@dataclass(frozen=True)
class IcebergReader(SourceReader):
    """Reads rows of the data files of an Iceberg table.

    Attributes:
        catalog: The catalog.
        table: Identifier of the table.
    """

    catalog: IcebergCatalog
    table: str

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read rows of data files, by field id, without deleted rows."""
        read = [self._read_span(span, schema, context) for span in fragment.spans]
        return pa.concat_tables(read)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record of a data file, which never changes once it is written."""
        found = self._opened(FileDetail()).io.new_input(file.url)
        return dataclasses.replace(file, size=len(found))

    def _read_span(self, span: FileSpan, schema: pa.Schema, context: ReadContext) -> pa.Table:
        def read() -> pa.Table:
            detail = FileDetail.loads(span.detail)
            opened = DataFile(self._opened(detail), span.url, detail)
            return opened.rows(span.start, span.stop, schema.names).cast(schema)

        try:
            return with_retries(_failpoints.failing("read", span.url, read))
        except SourceError:
            raise
        except FileNotFoundError as error:
            detail = FileDetail.loads(span.detail)
            raise expired(span.url, detail, self.table, context.location) from error
        except Exception as error:  # from pyiceberg, pyarrow, or the driver of a file system
            raise unreadable(span.url, error, context.location) from error

    def _opened(self, detail: FileDetail) -> Any:
        """Return the table, loaded again if it was changed or written anew since the last time."""
        properties = repr(sorted(revealed(self.catalog.properties).items()))
        key, now = (self.catalog.name, properties, self.table), time.monotonic()
        loaded, found = _loaded.get(key, (now, None))
        if found is None or now - loaded > _REFRESH_SECONDS or not _knows(found, detail):
            _loaded[key] = (now, open_table(self.catalog, self.table, "a worker"))
        return _loaded[key][1]


def expired(url: str, detail: FileDetail, table: str, location: str) -> SourceError:
    """Return the error for a data file, or a file of its deletes, that is gone.

    Args:
        url: The data file.
        detail: What applies to the file.
        table: Identifier of the table.
        location: The pipeline or fragment, for messages.
    """
    version = f"snapshot {detail.snapshot} of Iceberg table {table!r}"
    return cleaned_up(url, version, "a cleanup after expire_snapshots", location)


def _knows(table: Any, detail: FileDetail) -> bool:
    """Return whether loaded metadata of a table has the snapshot and the schema of a plan."""
    has_schema = detail.schema is None or detail.schema in table.schemas()
    return has_schema and (
        detail.snapshot is None or table.snapshot_by_id(detail.snapshot) is not None
    )


def open_table(catalog: IcebergCatalog, table: str, location: str) -> Any:
    """Load the current metadata of a table.

    Args:
        catalog: The catalog.
        table: Identifier of the table.
        location: The pipeline, for messages.

    Raises:
        SourceError: If there is no such table, or the catalog cannot be reached.
    """
    what = f"{location}: Iceberg table {table!r} of catalog {catalog.name!r}"
    with iceberg_errors(f"{what} cannot be read", SourceError):
        found = with_retries(functools.partial(catalog.table, table))
    if found is None:
        raise SourceError(f"{what} does not exist. Check its name, or create it first")
    return found


def with_schema(table: Any, schema_id: int | None) -> Any:
    """Return the metadata of a table in which one of its schemas is the current one.

    Args:
        table: The table.
        schema_id: The schema; None to keep the current one.

    Raises:
        SourceError: If the table no longer has that schema.
    """
    if schema_id is None or schema_id == table.metadata.current_schema_id:
        return table.metadata
    if schema_id not in table.schemas():
        raise SourceError(
            f"Iceberg table {'.'.join(table.name())!r} no longer has schema {schema_id}, by which "
            "this snapshot was planned; run the partition again"
        )
    return table.metadata.model_copy(update={"current_schema_id": schema_id})


def deleted_positions(io: Any, path: str, format: str) -> Mapping[str, Positions]:
    """Return the positions in a file of position deletes, or of deletion vectors, by data file.

    Args:
        io: The `FileIO` of the table.
        path: The delete file. It never changes, so the newest that were read are kept.
        format: Its format, as "PARQUET" or "PUFFIN".
    """
    from pyiceberg.io.pyarrow import _read_deletes
    from pyiceberg.manifest import DataFile, FileFormat

    if path not in _read:
        deletes = DataFile.from_args(file_path=path, file_format=FileFormat(format))
        found = {file: rows.to_numpy() for file, rows in _read_deletes(io, deletes).items()}
        _read[path] = found
        while len(_read) > _KEPT_DELETES:
            del _read[next(iter(_read))]
        return found
    return _read[path]


class DataFile:
    """A Parquet data file, read by a schema of its table.

    Args:
        table: The table, for its files, schemas and name mapping.
        url: The file.
        detail: What applies to the file.
    """

    def __init__(self, table: Any, url: str, detail: FileDetail) -> None:
        self._io, self._url, self._detail = table.io, url, detail
        self._metadata = with_schema(table, detail.schema)
        self._schema = self._metadata.schema()

    def footer(self) -> pq.FileMetaData:
        """Return the file's Parquet metadata."""
        with self._io.new_input(self._url).open() as stream:
            return pq.read_metadata(stream)

    def rows(self, start: int, stop: int, names: Sequence[str]) -> pa.Table:
        """Read rows by their numbers.

        Args:
            start: The first row.
            stop: The row after the last.
            names: The columns.
        """
        detail = self._detail
        if detail.positions is None:
            return self._at(start, stop, names)
        table = self._at(*detail.positions, names).filter(pa.array(self.live(*detail.positions)))
        return table.slice(start - detail.start, stop - start)

    def live(self, first: int, last: int) -> Mask:
        """Return which positions in a range hold rows: neither deleted nor filtered out.

        Args:
            first: The first position.
            last: The position after the last.
        """
        row_filter = self._detail.filter
        every = np.ones(last - first, bool)
        found = every if row_filter is None else self._passing(row_filter, first, last)
        deleted = self._deleted
        deleted = deleted[(deleted >= first) & (deleted < last)]
        found[deleted - first] = False
        return found

    def _passing(self, row_filter: str, first: int, last: int) -> Mask:
        """Return which rows in a range of positions pass the filter."""
        from pyiceberg.expressions.parser import parse
        from pyiceberg.expressions.visitors import bind, extract_field_ids
        from pyiceberg.io.pyarrow import expression_to_pyarrow

        bound = bind(self._schema, parse(row_filter), case_sensitive=True)
        paths = (self._schema.find_column_name(id) or "" for id in extract_field_ids(bound))
        table = self._at(first, last, list(dict.fromkeys(p.partition(".")[0] for p in paths)))
        place = "position in the file"
        table = table.append_column(place, pa.array(range(first, last), pa.int64()))
        passed = table.filter(expression_to_pyarrow(bound, self._schema)).column(place)
        found = np.zeros(last - first, bool)
        found[passed.to_numpy() - first] = True
        return found

    @functools.cached_property
    def _deleted(self) -> Positions:
        """The positions that the file's deletes name."""
        found = [deleted_positions(self._io, *each) for each in self._detail.deletes]
        positions = [each[self._url] for each in found if self._url in each]
        return np.concatenate([np.array([], np.int64), *positions])

    def _at(self, first: int, last: int, names: Sequence[str]) -> pa.Table:
        """Read a range of positions, with the columns of the table's schema."""
        from pyiceberg.io.pyarrow import pyarrow_to_schema
        from pyiceberg.schema import prune_columns
        from pyiceberg.types import ListType, MapType

        wanted = self._schema.select(*names)
        with (
            self._io.new_input(self._url).open() as stream,
            pq.ParquetFile(stream, pre_buffer=True) as file,
        ):
            own = pyarrow_to_schema(
                file.schema_arrow,
                self._metadata.name_mapping(),
                downcast_ns_timestamp_to_us=self._metadata.format_version <= 2,
                format_version=self._metadata.format_version,
            )
            same = _unchanged(wanted, own)
            changed = wanted.select(*(name for name in names if name not in same))
            leaves = {
                id
                for id in changed.field_ids
                if not isinstance(changed.find_type(id), (ListType, MapType))
            }
            pruned = prune_columns(own, leaves, select_full_types=False)
            groups, before = _row_groups(file.metadata, first, last)
            # One column at least: a batch without columns does not know its rows.
            columns = [*same.values(), *(each.name for each in pruned.columns)]
            table = file.read_row_groups(
                groups, columns=columns or [own.columns[0].name], use_threads=False
            )
        table = table.slice(first - before, last - first)
        found = {name: table.column(own_name) for name, own_name in same.items()}
        if len(found) < len(names):
            evolved = self._evolved(table, changed, pruned)
            found |= dict(zip(evolved.column_names, evolved.columns))
        return pa.table({name: found[name] for name in names})

    def _evolved(self, table: pa.Table, wanted: Any, own: Any) -> pa.Table:
        """Convert columns of the file's schema to the table's schema."""
        from pyiceberg.io.pyarrow import _to_requested_schema, schema_to_pyarrow

        batches = [
            _to_requested_schema(
                wanted,
                own,
                batch,
                downcast_ns_timestamp_to_us=self._metadata.format_version <= 2,
                projected_missing_fields=self._constants(),
                allow_timestamp_tz_mismatch=True,
            )
            for batch in table.to_batches()
        ]
        if not batches:
            return schema_to_pyarrow(wanted, include_field_ids=False).empty_table()
        return pa.Table.from_batches(batches)

    def _constants(self) -> dict[int, Any]:
        from pyiceberg.conversions import from_bytes

        return {
            int(id): from_bytes(self._schema.find_type(int(id)), bytes.fromhex(value))
            for id, value in self._detail.constants.items()
            if int(id) in self._schema.field_ids
        }


def _unchanged(wanted: Any, own: Any) -> dict[str, str]:
    """Return the nested columns that a file has in the wanted type, with their names in the file.

    They are not converted: pyiceberg 0.12 makes empty lists of null lists of structs.
    """
    known = {each.field_id: each for each in own.fields}
    return {
        each.name: known[each.field_id].name
        for each in wanted.fields
        if not each.field_type.is_primitive
        and each.field_id in known
        and known[each.field_id].field_type == each.field_type
    }


def _row_groups(footer: pq.FileMetaData, first: int, last: int) -> tuple[list[int], int]:
    """Return the row groups that overlap a range, and the position of their first row."""
    rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    edges = list(itertools.accumulate(rows, initial=0))
    found = [i for i, (a, b) in enumerate(itertools.pairwise(edges)) if a < last and b > first]
    return found, edges[found[0]] if found else first
