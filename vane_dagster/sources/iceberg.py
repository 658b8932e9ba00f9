"""`IcebergSource`: the rows of an Iceberg table at a snapshot."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._arguments import check_placeholders, filled_filter, list_of_names
from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster.errors import DefinitionError, SourceError, names
from vane_dagster.sources.base import (
    FragmentRule,
    Listed,
    Source,
    SourceReader,
    SourceTable,
    fragment_record,
    unreadable,
)
from vane_dagster.sources.file_source import asset_path
from vane_dagster.sources.iceberg_scan import (
    DataFile,
    FileDetail,
    IcebergReader,
    deleted_positions,
    expired,
    open_table,
    with_schema,
)
from vane_dagster.sources.parquet import cut
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import IO_THREADS
from vane_dagster.storage.iceberg_catalog import (
    iceberg_errors,
    parse_catalog,
    parse_identifier,
)
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.storage.transient_errors import with_retries

if TYPE_CHECKING:
    import dagster as dg

    from vane_dagster.storage.store import Store


@dataclass(frozen=True)
class IcebergSource(IcebergReader, Source):
    """The rows of an Iceberg table, at one snapshot or at the current one of each run.

    A unit is a data file with its delete files, so a commit that adds files computes only those.

    Attributes:
        catalog: The catalog.
        table: Identifier of the table.
        snapshot: A snapshot id, or the name of a branch or tag; None for the current snapshot.
        filter: A row filter of pyiceberg, with placeholders for the partition's key.
        columns: The columns to read; None for all.
        asset: Key of the Dagster asset that writes the table, as "a/b", if there is one.
        allow_empty: Whether a partition without rows is accepted.
        planned: The table as the run plans it, once the source is bound to a store.
    """

    kind: ClassVar[str] = "iceberg"
    snapshot: int | str | None = None
    filter: str | None = None
    columns: tuple[str, ...] | None = None
    asset: str | None = None
    allow_empty: bool = False
    planned: _PlannedTable | None = field(default=None, init=False, repr=False, compare=False)

    def validate(self, location: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> None:
        if partitions_def is not None and self.filter is None:
            raise DefinitionError(
                f"{location}: vd.iceberg({self.table!r}) has no filter, so that every partition "
                "would have the same rows; give it one, as filter=\"day = '{partition_key}'\", or "
                "leave partitions_def out"
            )
        if self.filter is not None:
            check_placeholders(location, self.filter, partitions_def)

    def describe(self) -> str:
        return f"Iceberg table {self.place}"

    @property
    def place(self) -> str:
        return f"{self.catalog.name}.{self.table}"

    def url_for(self, partition_key: str | None) -> str:
        """Return the name of the table, and the partition's filter."""
        if self.filter is None:
            return self.place
        shown = self.filter if partition_key is None else filled_filter(self.filter, partition_key)
        return f"{self.place} where {shown}"

    def schema(self, location: str) -> pa.Schema:
        return _PlannedTable(self, location).arrow_schema

    def bind(self, store: Store) -> Source:
        bound = replace(self)
        object.__setattr__(bound, "planned", _PlannedTable(bound, "the source"))
        return bound

    def for_workers(self) -> SourceReader:
        return IcebergReader(self.catalog, self.table)

    @property
    def splitting(self) -> str:
        return "positions of live rows, 1"

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the data files of the snapshot that may have rows of each partition.

        Args:
            partitions: Keys; ``[None]`` for an unpartitioned pipeline.
            location: The pipeline, for messages.

        Raises:
            SourceError: If the table cannot be loaded.
        """
        planned = self.planned or _PlannedTable(self, location)

        def listed(key: str | None) -> Listed:
            try:
                return tuple(unit.record for unit in planned.units(key))
            except SourceError as error:
                return error

        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            return dict(zip(partitions, threads.map(listed, partitions)))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        if self.allow_empty:
            return None
        return SourceError(
            f"{location}: no data file of {self.url_for(partition)} may have rows. Check the "
            "filter, write the partition first, or accept it with vd.iceberg(..., allow_empty=True)"
        )

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        planned = self.planned or _PlannedTable(self, location)
        units = {(u.record.url, u.record.version): u for u in planned.units(partition)}
        if gone := [file.url for file in files if (file.url, file.version) not in units]:
            raise SourceError(
                f"{location}: table {self.place} was changed while the run was planned, so that "
                f"{names(gone)} is no longer in it. Run the partition again"
            )

        def fragments(file: FileRecord) -> list[FragmentRecord]:
            unit = units[file.url, file.version]
            try:
                read = _failpoints.failing("read", file.url, lambda: planned.cut(unit, rule))
                return list(with_retries(read))
            except SourceError:
                raise
            except FileNotFoundError as error:
                raise expired(file.url, unit.detail, self.table, location) from error
            except Exception as error:  # from pyiceberg, pyarrow, or a file system's driver
                raise unreadable(file.url, error, location) from error

        with ThreadPoolExecutor(max_workers=IO_THREADS) as threads:
            found = itertools.chain.from_iterable(threads.map(fragments, files))
            return SourceTable(planned.arrow_schema, tuple(found))


@dataclass(frozen=True)
class _Unit:
    """A data file of a scan.

    Attributes:
        record: Its file record.
        detail: What applies to all its rows.
    """

    record: FileRecord
    detail: FileDetail


class _PlannedTable:
    """A table and its snapshot, loaded on first use, so that one plan sees one snapshot.

    Args:
        source: The source.
        location: The pipeline, for messages.
    """

    def __init__(self, source: IcebergSource, location: str) -> None:
        self._source, self._location = source, location
        self._units: dict[str | None, tuple[_Unit, ...]] = {}

    @functools.cached_property
    def _table(self) -> Any:
        return open_table(self._source.catalog, self._source.table, self._location)

    @functools.cached_property
    def _snapshot(self) -> Any:
        """The snapshot to read; None for a table that has none."""
        wanted = self._source.snapshot
        if wanted is None:
            return self._table.current_snapshot()
        is_id = isinstance(wanted, int)
        found = (self._table.snapshot_by_id if is_id else self._table.snapshot_by_name)(wanted)
        if found is None:
            known = [*self._table.refs(), *(str(s.snapshot_id) for s in self._table.snapshots())]
            raise SourceError(
                f"{self._location}: table {self._source.place} has no snapshot {wanted!r}; it has "
                f"{names(known)}. Snapshots that were expired are gone"
            )
        return found

    @functools.cached_property
    def _metadata(self) -> Any:
        """The table's metadata; the schema is that of a snapshot that was asked for."""
        pinned = self._source.snapshot is not None
        return with_schema(self._table, self._snapshot.schema_id if pinned else None)

    @functools.cached_property
    def _schema(self) -> Any:
        """The Iceberg schema of the columns to read."""
        schema = self._metadata.schema()
        if self._source.columns is None:
            return schema
        known = [each.name for each in schema.fields]
        owner = f"{self._location}: table {self._source.place}"
        require_columns(owner, self._source.columns, known, SourceError)
        return schema.select(*self._source.columns)

    @functools.cached_property
    def arrow_schema(self) -> pa.Schema:
        """The columns and their Arrow types."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        return plain_schema(schema_to_pyarrow(self._schema, include_field_ids=False))

    def units(self, partition: str | None) -> tuple[_Unit, ...]:
        """Return the data files that may have rows of a partition, sorted by URL.

        Args:
            partition: The partition's key.

        Raises:
            SourceError: If they cannot be listed, or the table has deletes that pyiceberg cannot
                apply.
        """
        if partition not in self._units:
            source = self._source
            what = f"{self._location}: {source.url_for(partition)} cannot be listed"
            with iceberg_errors(what, SourceError):
                found = with_retries(
                    lambda: list(self._planned(filled_filter(source.filter, partition)))
                )
            self._units[partition] = tuple(sorted(found, key=lambda unit: unit.record.url))
        return self._units[partition]

    def _planned(self, row_filter: str | None) -> Iterator[_Unit]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.manifest import FileFormat
        from pyiceberg.table import DataScan

        if self._snapshot is None:
            return
        scan = DataScan(
            table_metadata=self._metadata,
            io=self._table.io,
            snapshot_id=self._snapshot.snapshot_id,
            row_filter=row_filter or AlwaysTrue(),
        )
        tested = self._tested(row_filter)
        for task in self._tasks(scan):
            file = task.file
            if file.file_format != FileFormat.PARQUET:
                raise SourceError(
                    f"{self._location}: data file {file.file_path!r} is {file.file_format.value}, "
                    "and vd.iceberg reads Parquet alone. Rewrite the table's data files as Parquet"
                )
            deletes = [each for each in task.delete_files if self._names(each, file.file_path)]
            detail = FileDetail(
                snapshot=self._snapshot.snapshot_id,
                schema=self._metadata.current_schema_id,
                deletes=tuple(sorted((each.file_path, each.file_format.value) for each in deletes)),
                filter=None if isinstance(task.residual, AlwaysTrue) else row_filter,
                constants=self._constants(file),
            )
            yield _Unit(self._record(file, detail, tested), detail)

    def _tasks(self, scan: Any) -> Sequence[Any]:
        try:
            return list(scan.plan_files())
        except ValueError as error:
            if "equality deletes" not in str(error):
                raise
            raise SourceError(
                f"{self._location}: table {self._source.place} has equality deletes, which "
                "pyiceberg cannot apply. Compact the table first, for example with Spark's "
                "rewrite_data_files, or read a snapshot without them"
            ) from error

    def _names(self, deletes: Any, path: str) -> bool:
        """Return whether a delete file of a data file's partition has positions in that file."""
        from pyiceberg.table.delete_file_index import _referenced_data_file_path

        if _referenced_data_file_path(deletes) == path:
            return True
        return path in deleted_positions(self._table.io, deletes.file_path, deletes.file_format)

    def _record(self, file: Any, detail: FileDetail, tested: Sequence[int]) -> FileRecord:
        """Return the record of a file; its version is a digest of all that its rows follow from.

        Args:
            file: The data file.
            detail: What applies to all its rows.
            tested: The ids of the filter's columns.
        """
        columns = [
            (each.field_id, each.name, str(each.field_type), str(each.initial_default))
            for each in self._schema.fields
        ]
        tests = detail.filter and [detail.filter, tested]
        text = json.dumps([columns, detail.deletes, tests, detail.constants])
        version = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return FileRecord(file.file_path, file.file_size_in_bytes, version)

    def _tested(self, row_filter: str | None) -> list[int]:
        """Return the ids of a filter's columns: a name may have been another column's."""
        from pyiceberg.expressions.parser import parse
        from pyiceberg.expressions.visitors import bind, extract_field_ids

        if row_filter is None:
            return []
        bound = bind(self._metadata.schema(), parse(row_filter), case_sensitive=True)
        return sorted(extract_field_ids(bound))

    def _constants(self, file: Any) -> dict[str, str]:
        """Return the values of columns that follow from a data file's partition."""
        from pyiceberg.conversions import to_bytes
        from pyiceberg.transforms import IdentityTransform

        spec, schema = self._metadata.specs()[file.spec_id], self._metadata.schema()
        return {
            str(each.source_id): to_bytes(schema.find_type(each.source_id), value).hex()
            for each, value in zip(spec.fields, file.partition)
            if isinstance(each.transform, IdentityTransform)
            and value is not None
            and each.source_id in schema.field_ids
        }

    def cut(self, unit: _Unit, rule: FragmentRule) -> Iterator[FragmentRecord]:
        """Cut a data file into fragments, along its row groups.

        Deleted and filtered rows are counted by reading the deletes and the filter's columns.

        Args:
            unit: The file.
            rule: The maximum size of a fragment.
        """
        file = DataFile(self._table, unit.record.url, unit.detail)
        exact = unit.detail.filter is None and not unit.detail.deletes
        start = 0
        for piece in cut(unit.record, file.footer(), rule):
            positions = (piece.start, piece.stop)
            rows = piece.stop - piece.start if exact else int(np.sum(file.live(*positions)))
            if not rows:
                continue
            own = unit.detail if exact else replace(unit.detail, start=start, positions=positions)
            spans = [(unit.record, start, start + rows)]
            yield fragment_record(spans, piece.bytes, details=[own.dumps()])
            start += rows


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
    if filter is not None and not (isinstance(filter, str) and filter.strip()):
        raise DefinitionError(
            f'{where}: filter is {filter!r}; expected a row filter as text, as "n > 3"'
        )
    return IcebergSource(
        parse_catalog(where, catalog),
        parse_identifier(where, table),
        snapshot,
        filter,
        list_of_names(where, "columns", columns),
        asset_path(asset, where),
        allow_empty,
    )
