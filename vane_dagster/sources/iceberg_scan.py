"""Scan tasks of pyiceberg, as a span's detail records them, and how a worker reads their rows.

pyiceberg 0.12 reads the whole file of a task, and null lists of structs as empty ones. Workers call
copies of its functions that read some row groups of the file, and keep the nulls. So a fragment
costs the time and memory of its own row groups.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vane_dagster import _failpoints
from vane_dagster._secrets import revealed
from vane_dagster.errors import SourceError
from vane_dagster.sources.base import ReadContext, SourceReader, cleaned_up, unreadable
from vane_dagster.storage.iceberg_catalog import IcebergCatalog, iceberg_errors
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.storage.transient_errors import with_retries

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_REFRESH_SECONDS = 300.0
"""A catalog may lend credentials that expire: workers load the table again after this time."""
_loaded: dict[tuple[str, str, str], tuple[float, Any]] = {}


@dataclass(frozen=True)
class TaskDetail:
    """A scan task of pyiceberg without its data file's statistics, as the `detail` of spans.

    Attributes:
        snapshot: The snapshot in which the task was planned.
        schema: The schema by which the file is read.
        spec: The partition spec of the file.
        partition: Values of identity transforms, in Iceberg's binary form as hex digits.
        deletes: Path and format of each file of position deletes or deletion vectors.
        filter: The row filter; None if all rows of the file pass it.
        groups: The first row group to read, and the one after the last.
        position: Position in the file of the first row of these row groups.
        start: Number of the first row of these row groups that is left.
    """

    snapshot: int
    schema: int
    spec: int
    partition: Sequence[str | None]
    deletes: Sequence[Sequence[str]] = ()
    filter: str | None = None
    groups: Sequence[int] = (0, 0)
    position: int = 0
    start: int = 0

    def dumps(self) -> str:
        """Convert to JSON."""
        return json.dumps(vars(self))

    @classmethod
    def of(cls, span: FileSpan) -> TaskDetail:
        """Read what `dumps` wrote.

        Raises:
            FileNotFoundError: If the span has no detail, as for a file that is gone.
        """
        if not span.detail:
            raise FileNotFoundError(span.url)
        return cls(**json.loads(span.detail))


@dataclass(frozen=True)
class IcebergReader(SourceReader):
    """Reads rows of scan tasks of an Iceberg table.

    Attributes:
        catalog: The catalog.
        table: Identifier of the table.
    """

    catalog: IcebergCatalog
    table: str

    def read(self, fragment: FragmentRecord, schema: pa.Schema, context: ReadContext) -> pa.Table:
        """Read rows by pyiceberg, which applies deletes, the filter and the table's schema."""
        read = [self._read_span(span, schema, context) for span in fragment.spans]
        return pa.concat_tables(read)

    def current(self, file: FileRecord) -> FileRecord:
        """Return the record of a data file, which never changes once it is written."""
        return dataclasses.replace(file, size=len(self._opened(None).io.new_input(file.url)))

    def _read_span(self, span: FileSpan, schema: pa.Schema, context: ReadContext) -> pa.Table:
        detail = TaskDetail.of(span)

        def read() -> pa.Table:
            task = ScanTask(self._opened(detail), span.url, detail)
            return task.rows(span.start - detail.start, span.stop - detail.start, schema)

        try:
            return with_retries(_failpoints.failing("read", span.url, read))
        except SourceError:
            raise
        except FileNotFoundError as error:
            raise expired(span.url, detail.snapshot, self.table, context.location) from error
        except Exception as error:  # from pyiceberg, pyarrow, or the driver of a file system
            raise unreadable(span.url, error, context.location) from error

    def _opened(self, detail: TaskDetail | None) -> Any:
        """Return the table, loaded again if it was changed or written anew since the last time."""
        properties = repr(sorted(revealed(self.catalog.properties).items()))
        key, now = (self.catalog.name, properties, self.table), time.monotonic()
        loaded, found = _loaded.get(key, (now, None))
        is_known = found is not None and (
            detail is None
            or (detail.schema in found.schemas() and found.snapshot_by_id(detail.snapshot))
        )
        if now - loaded > _REFRESH_SECONDS or not is_known:
            _loaded[key] = (now, open_table(self.catalog, self.table, "a worker"))
        return _loaded[key][1]


def expired(url: str, snapshot: int, table: str, location: str) -> SourceError:
    """Return the error for a data file, or a file of its deletes, that is gone.

    Args:
        url: The data file.
        snapshot: The snapshot in which it was planned.
        table: Identifier of the table.
        location: The pipeline or fragment, for messages.
    """
    version = f"snapshot {snapshot} of Iceberg table {table!r}"
    return cleaned_up(url, version, "a cleanup after expire_snapshots", location)


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


def tested_ids(schema: Any, where: str | None) -> list[int]:
    """Return the ids of a filter's columns: a name may have been another column's.

    Args:
        schema: The table's schema.
        where: The filter; None for none.
    """
    from pyiceberg.expressions.parser import parse
    from pyiceberg.expressions.visitors import bind, extract_field_ids

    if where is None:
        return []
    return sorted(extract_field_ids(bind(schema, parse(where), case_sensitive=True)))


class ScanTask:
    """A scan task of pyiceberg, made from its detail.

    Args:
        table: The table.
        url: The data file.
        detail: The detail.
    """

    def __init__(self, table: Any, url: str, detail: TaskDetail) -> None:
        from pyiceberg.conversions import from_bytes
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.table import FileScanTask
        from pyiceberg.typedef import Record

        self._io, self._url, self._detail = table.io, url, detail
        self._metadata = with_schema(table, detail.schema)
        self._schema = self._metadata.schema()
        values = [
            None if value is None else from_bytes(self._schema.find_type(each.source_id), value)
            for each, value in zip(
                self._metadata.specs()[detail.spec].fields,
                [None if text is None else bytes.fromhex(text) for text in detail.partition],
            )
        ]
        file = DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=url,
            file_format=FileFormat.PARQUET,
            partition=Record(*values),
        )
        file.spec_id = detail.spec
        deletes = {
            DataFile.from_args(file_path=path, file_format=FileFormat(kind))
            for path, kind in detail.deletes
        }
        self._task = FileScanTask(file, deletes)

    def rows(self, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        """Read rows by their numbers among those that are left of the row groups.

        Args:
            start: The first row.
            stop: The row after the last.
            schema: The columns, with their types.
        """
        found, at = [schema.empty_table()], 0
        for batch in self._batches(schema.names):
            first, last = max(0, start - at), min(batch.num_rows, stop - at)
            if first < last:
                table = pa.Table.from_batches([batch.slice(first, last - first)])
                found.append(table.select(schema.names).cast(schema))
            at += batch.num_rows
            if at >= stop:
                break
        return pa.concat_tables(found)

    def count(self) -> int:
        """Return the number of rows that are left, by reading the columns of the filter."""
        ids = tested_ids(self._schema, self._detail.filter)
        paths = (self._schema.find_column_name(id) or "" for id in ids)
        names = dict.fromkeys(path.partition(".")[0] for path in paths)
        return sum(batch.num_rows for batch in self._batches(list(names)))

    def footer(self) -> pq.FileMetaData:
        """Return the file's Parquet metadata."""
        with self._io.new_input(self._url).open() as stream:
            return pq.read_metadata(stream)

    def _batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read the rows that are left of the row groups, batch by batch."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.expressions.parser import parse
        from pyiceberg.io import pyarrow as library

        where, position = self._detail.filter, self._detail.position
        passing = AlwaysTrue() if where is None else parse(where)
        scan = library.ArrowScan(self._metadata, self._io, self._schema.select(*names), passing)
        positions = library._read_all_delete_files(self._io, [self._task]).get(self._url, ())
        deletes = {self._url: [pc.subtract(each, position) for each in positions]}
        # Copies of the library's functions, which differ in the two names.
        known = {
            **vars(library),
            "_get_file_format": self._format,
            "ArrowProjectionVisitor": _projection(),
        }
        for function in (
            library._to_requested_schema,
            library._task_to_record_batches,
            library.ArrowScan._record_batches_from_scan_tasks_and_deletes,
        ):
            name, defaults = function.__name__, function.__defaults__
            read = known[name] = FunctionType(function.__code__, known, name, defaults)
        yield from read(scan, [self._task], deletes)

    def _format(self, kind: Any, **options: Any) -> _RowGroups:
        """Return the format of the file, in place of the library's function."""
        import pyarrow.dataset as ds  # imports pandas if it is installed

        return _RowGroups(ds.ParquetFileFormat(**options), range(*self._detail.groups))


class _RowGroups(NamedTuple):
    """A format of Parquet files that opens some of their row groups."""

    format: ds.ParquetFileFormat
    groups: Sequence[int]

    def make_fragment(self, stream: Any) -> ds.ParquetFileFragment:
        """Open a file, as a `pyarrow.dataset.FileFormat` does."""
        return self.format.make_fragment(stream).subset(row_group_ids=self.groups)


@functools.lru_cache(maxsize=1)
def _projection() -> type:
    """Return pyiceberg's conversion to the table's schema, which keeps nulls.

    That of pyiceberg 0.12 makes empty lists and maps of null ones of structs.
    """
    from pyiceberg.io.pyarrow import ArrowProjectionVisitor

    class Projection(ArrowProjectionVisitor):
        def list(self, kind: Any, values: Any, inner: Any) -> Any:
            return _with_nulls(super().list(kind, values, inner), values)

        def map(self, kind: Any, values: Any, keys: Any, items: Any) -> Any:
            return _with_nulls(super().map(kind, values, keys, items), values)

    return Projection


def _with_nulls(converted: pa.Array | None, values: pa.Array) -> pa.Array | None:
    """Return converted values that are null where the original ones are."""
    if converted is None or not values.null_count:
        return converted
    return pc.if_else(values.is_valid(), converted, pa.scalar(None, converted.type))
