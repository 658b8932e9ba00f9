"""`IcebergSource`: the rows of an Iceberg table at a snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster._secrets import revealed
from vane_dagster.errors import DefinitionError, SourceError, names
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import FragmentRule, ReadContext
from vane_dagster.sources.iceberg_scan import (
    ScanTask,
    TaskDetail,
    open_table,
    tested_ids,
    with_schema,
)
from vane_dagster.sources.lake_source import LakeSource, LakeTable, cut_live, digest, lake_arguments
from vane_dagster.sources.parquet import row_groups
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.iceberg_catalog import (
    IcebergCatalog,
    iceberg_errors,
    parse_catalog,
    parse_identifier,
)
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord

_REFRESH_SECONDS = 300.0
"""A catalog may lend credentials that expire: workers load the table again after this time."""
_loaded: dict[tuple[str, str, str], tuple[float, Any]] = {}
Positions = np.ndarray[Any, np.dtype[np.int64]]
Unit = tuple[Positions, str | None, TaskDetail]
"""The deleted positions of a data file, the filter of its rows, and its scan task."""


@dataclass(frozen=True)
class IcebergSource(LakeSource):
    """The rows of an Iceberg table.

    A unit is a data file with its deletes, so a commit that adds files computes only those.

    Attributes:
        catalog: The catalog.
        table: Identifier of the table.
        snapshot: A snapshot id, or the name of a branch or tag; None for the current snapshot.
    """

    kind: ClassVar[str] = "iceberg"
    cleanup: ClassVar[str] = "a cleanup after expire_snapshots"
    catalog: IcebergCatalog
    table: str
    snapshot: int | str | None = None

    @property
    def place(self) -> str:
        return f"{self.catalog.name}.{self.table}"

    def open_table(self, url: str, location: str) -> LakeTable:
        table = open_table(self.catalog, self.table, location)
        return IcebergTable(self, location, table, self.place)

    def exists(self, url: str) -> bool:
        return bool(self._opened(None).io.new_input(url).exists())

    def read_rows(self, span: FileSpan, schema: pa.Schema, context: ReadContext) -> pa.Table:
        detail = TaskDetail.of(span)

        def read() -> pa.Table:
            task = ScanTask(self._opened(detail), span.url, detail)
            return task.rows(span.start, span.stop, schema)

        return with_retries(_failpoints.failing("read", span.url, read))

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


class IcebergTable(LakeTable):
    """A table at one snapshot."""

    def __init__(self, source: Any, location: str, table: Any, name: str) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        super().__init__(source, location, table, name)
        self._snapshot = self._table.current_snapshot()
        schema_id = None
        if source.snapshot is not None:
            self._snapshot = self._wanted(source.snapshot)
            schema_id = self._snapshot.schema_id
        self._metadata = with_schema(self._table, schema_id)
        self._read = self._metadata.schema()
        if source.columns is not None:
            known = [each.name for each in self._read.fields]
            require_columns(self._owner, source.columns, known, SourceError)
            self._read = self._read.select(*source.columns)
        self.schema = plain_schema(schema_to_pyarrow(self._read, include_field_ids=False))

    def list_units(self, where: str | None) -> Sequence[tuple[FileRecord, Unit]]:
        """List the scan tasks of the snapshot, sorted by URL."""
        shown = self._source.place if where is None else f"{self._source.place} where {where}"
        with iceberg_errors(f"{self.location}: {shown} cannot be listed", SourceError):
            units = with_retries(lambda: list(self._planned(where)))
        return sorted(units, key=lambda unit: unit[0].url)

    def cut(self, record: FileRecord, unit: Unit, rule: FragmentRule) -> Sequence[FragmentRecord]:
        """Cut a data file along its row groups; rows that pass a filter are found by reading it."""
        deleted, where, detail = unit
        task = ScanTask(self._table, record.url, detail)

        def planned() -> list[FragmentRecord]:
            footer = task.footer()
            rows = footer.num_rows
            live = np.ones(rows, bool) if where is None else task.passing(where, rows)
            live[deleted] = False
            return list(cut_live(record, row_groups(footer), live, rule, detail.dumps()))

        return with_retries(_failpoints.failing("read", record.url, planned))

    def _wanted(self, snapshot: int | str) -> Any:
        is_id = isinstance(snapshot, int)
        found = (self._table.snapshot_by_id if is_id else self._table.snapshot_by_name)(snapshot)
        if found is None:
            known = [*self._table.refs(), *(str(s.snapshot_id) for s in self._table.snapshots())]
            raise SourceError(
                f"{self._owner} has no snapshot {snapshot!r}; it has {names(known)}. Snapshots "
                "that were expired are gone"
            )
        return found

    def _planned(self, where: str | None) -> Iterator[tuple[FileRecord, Unit]]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import _read_all_delete_files
        from pyiceberg.manifest import FileFormat
        from pyiceberg.table import DataScan

        if self._snapshot is None:
            return
        scan = DataScan(
            table_metadata=self._metadata,
            io=self._table.io,
            snapshot_id=self._snapshot.snapshot_id,
            row_filter=where or AlwaysTrue(),
        )
        tasks = self._tasks(scan)
        positions = _read_all_delete_files(self._table.io, tasks)
        tested = tested_ids(self._metadata.schema(), where)
        for task in tasks:
            file = task.file
            if file.file_format != FileFormat.PARQUET:
                raise SourceError(
                    f"{self.location}: data file {file.file_path!r} is {file.file_format.value}, "
                    "and vd.iceberg reads Parquet alone. Rewrite the table's data files as Parquet"
                )
            named = [np.asarray(each) for each in positions.get(file.file_path, ())]
            deleted = np.unique(np.concatenate([np.array([], np.int64), *named]))
            detail = TaskDetail(
                snapshot=self._snapshot.snapshot_id,
                schema=self._metadata.current_schema_id,
                spec=file.spec_id,
                partition=self._partition(file),
            )
            # pyiceberg takes null for a value that differs, but not where it filters rows.
            passes_all = isinstance(task.residual, AlwaysTrue) and None not in list(file.partition)
            of_rows = None if passes_all else where
            columns = [
                (each.field_id, each.name, str(each.field_type), str(each.initial_default))
                for each in self._read.fields
            ]
            tests = of_rows and [of_rows, tested]
            version = digest([columns, digest(deleted.tobytes()), tests, detail.partition])
            record = FileRecord(file.file_path, file.file_size_in_bytes, version)
            yield record, (deleted, of_rows, detail)

    def _tasks(self, scan: Any) -> Sequence[Any]:
        try:
            return list(scan.plan_files())
        except ValueError as error:
            if "equality deletes" not in str(error):
                raise
            raise SourceError(
                f"{self._owner} has equality deletes, which pyiceberg cannot apply. Compact the "
                "table first, for example with Spark's rewrite_data_files, or read a snapshot "
                "without them"
            ) from error

    def _partition(self, file: Any) -> list[str | None]:
        """Return the partition values from which columns follow that the file lacks."""
        from pyiceberg.conversions import to_bytes
        from pyiceberg.transforms import IdentityTransform

        schema = self._metadata.schema()
        return [
            to_bytes(schema.find_type(each.source_id), value).hex()
            if isinstance(each.transform, IdentityTransform)
            and value is not None
            and each.source_id in schema.field_ids
            else None
            for each, value in zip(self._metadata.specs()[file.spec_id].fields, file.partition)
        ]


@known_keywords("vd.iceberg")
def iceberg(
    catalog: Any,
    table: str,
    *,
    snapshot: int | str | None = None,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    asset: Any = None,
    allow_empty: bool = False,
) -> IcebergSource:
    """Declare an Iceberg table as a pipeline's source. It requires ``vane-dagster[iceberg]``.

    Position deletes and deletion vectors are applied; a table with equality deletes is refused.
    Renamed, added, reordered and widened columns are read by their field ids, as in pyiceberg.

    Args:
        catalog: The name of a catalog in pyiceberg's configuration (``.pyiceberg.yaml`` or
            ``PYICEBERG_CATALOG__*`` variables), its properties with an optional ``"name"``, or a
            ``pyiceberg.catalog.Catalog``. Workers open the catalog too. Properties are in no key.
        table: Namespace and name of the table, as "db.events".
        snapshot: A snapshot id, or the name of a branch or tag. By default each run reads the
            snapshot that is current when it is planned, and computes only the data files that are
            new or have new deletes.
        filter: A row filter of pyiceberg, as ``"day = '{partition_key}'"``. A partitioned pipeline
            needs one. ``{partition_key}`` is replaced by the partition's key, and
            ``{partition_key.<dimension>}`` by one dimension of a multi-partition.
        columns: The columns to read; all by default. A change of the schema of other columns then
            computes nothing.
        asset: The Dagster asset that writes the table: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without any rows is accepted; an error by default.

    Raises:
        DefinitionError: If an argument has another form, or pyiceberg is not installed.
    """
    where = "vd.iceberg"
    if type(snapshot) not in (int, str, type(None)):
        raise DefinitionError(
            f"{where}: snapshot is {snapshot!r}; expected a snapshot id, or the name of a branch "
            "or tag"
        )
    return IcebergSource(
        parse_catalog(where, catalog),
        parse_identifier(where, table),
        snapshot,
        **lake_arguments(where, filter, columns, asset, allow_empty),
    )
