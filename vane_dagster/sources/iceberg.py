"""`IcebergSource`: the rows of an Iceberg table at a snapshot."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster._lazy import pq
from vane_dagster._secrets import revealed
from vane_dagster.errors import SourceError
from vane_dagster.retries import with_retries
from vane_dagster.sources.base import FragmentRule
from vane_dagster.sources.lake_source import (
    Detail,
    LakeSource,
    LakeTable,
    cut_live,
    digest,
    lake_arguments,
)
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.iceberg_catalog import (
    IcebergCatalog,
    parse_catalog,
    parse_identifier,
)
from vane_dagster.storage.manifest import FileRecord, FileSpan, FragmentRecord
from vane_dagster.types.casts import cast_table

_REFRESH_SECONDS = 300.0
"""A catalog may lend credentials that expire: workers load the table again after this time."""
_loaded: dict[str, tuple[Any, Any]] = {}


class DataFile(NamedTuple):
    """A data file of a snapshot, for one filter.

    Attributes:
        deleted: The positions of its deleted rows.
        where: The filter that its rows have to pass; None if all do.
        detail: The snapshot, the id of the schema by which the file is read, and values of columns
            that it may lack, by their field ids, in Iceberg's binary form as hex digits.
    """

    deleted: np.ndarray[Any, np.dtype[np.int64]]
    where: str | None
    detail: Mapping[str, Any]


class _Manifest:
    """A manifest of a snapshot, as `pyiceberg.manifest.ManifestFile`; its entries are read once."""

    def __init__(self, file: Any) -> None:
        self._file, self.fetch_manifest_entry = file, functools.cache(file.fetch_manifest_entry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class IcebergTable(LakeTable):
    """A table at one snapshot."""

    def __init__(self, source: Any, location: str, table: Any, name: str) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        super().__init__(source, location, table, name)
        self._snapshot, self._schema = table.current_snapshot(), table.schema()
        if source.snapshot is not None:
            self._snapshot = self._wanted(source.snapshot)
            if (schema_id := self._snapshot.schema_id) is not None:
                self._schema = table.schemas()[schema_id]
        known = [each.name for each in self._schema.fields]
        require_columns(self._owner, source.columns or (), known, SourceError)
        wanted = source.columns
        self._read = self._schema if wanted is None else self._schema.select(*wanted)
        update = {"current_schema_id": self._schema.schema_id}
        self._metadata = table.metadata.model_copy(update=update)
        self.schema = plain_schema(schema_to_pyarrow(self._read, include_field_ids=False))

    def cut(
        self, record: FileRecord, unit: DataFile, rule: FragmentRule
    ) -> Iterator[FragmentRecord]:
        """Cut a data file along its row groups; rows that pass a filter are found by reading it."""
        from vane_dagster.sources.iceberg_scan import passing

        with self._table.io.new_input(record.url).open() as stream:
            footer = pq.read_metadata(stream)
        live, constants = np.ones(footer.num_rows, bool), unit.detail["constants"]
        if (where := unit.where) is not None:
            live = passing(self._table, record.url, constants, self._schema, where, len(live))
        live[unit.deleted] = False
        yield from cut_live(record, footer, live, rule, unit.detail)

    def _wanted(self, snapshot: int | str) -> Any:
        is_id = isinstance(snapshot, int)
        chosen = (self._table.snapshot_by_id if is_id else self._table.snapshot_by_name)(snapshot)
        if chosen is None:
            raise SourceError(
                f"{self._owner} has no snapshot {snapshot!r}. It may have been expired; name "
                "another one"
            )
        return chosen

    def list_units(self, where: str | None) -> Iterator[tuple[FileRecord, DataFile]]:
        """List the scan tasks of the snapshot, sorted by URL."""
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.table import ManifestGroupPlanner

        from vane_dagster.sources.iceberg_scan import tested_ids

        if self._snapshot is None:
            return
        planner = ManifestGroupPlanner(self._metadata, self._table.io, where or AlwaysTrue())
        planned: Any = planner.plan_files(self._manifests)
        tasks = sorted(planned, key=lambda task: str(task.file.file_path))
        in_threads(self._deleted, {each for task in tasks for each in task.delete_files})
        tested = where and tested_ids(self._schema, where)
        columns = [
            (each.field_id, each.name, str(each.field_type), str(each.initial_default))
            for each in self._read.fields
        ]
        for task in tasks:
            file = task.file
            named = (self._deleted(each).get(file.file_path) for each in task.delete_files)
            given = [np.asarray(each) for each in named if each is not None]
            deleted = np.unique(np.concatenate([np.array([], np.int64), *given]))
            constants = self._constants(file)
            # pyiceberg takes null for a value that differs, but not where it filters rows.
            passes_all = isinstance(task.residual, AlwaysTrue) and None not in list(file.partition)
            of_rows = None if passes_all else where
            tests = of_rows and [of_rows, tested]
            version = digest([columns, digest(deleted.tobytes()), tests, constants])
            detail = {
                "snapshot": self._snapshot.snapshot_id,
                "schema": self._schema.schema_id,
                "constants": constants,
            }
            record = FileRecord(file.file_path, file.file_size_in_bytes, version)
            yield record, DataFile(deleted, of_rows, detail)

    def forget(self) -> None:
        for name in ("_manifests", "_deleted"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def _manifests(self) -> Sequence[Any]:
        return [_Manifest(each) for each in self._snapshot.manifests(self._table.io)]

    @functools.cached_property
    def _deleted(self) -> Callable[[Any], Mapping[str, Any]]:
        """Return the positions that a delete file names, by data file; each file is read once."""
        from pyiceberg.io.pyarrow import _read_deletes

        return functools.cache(functools.partial(_read_deletes, self._table.io))

    def _constants(self, file: Any) -> dict[str, str]:
        """Return the partition values from which columns follow that the file lacks."""
        from pyiceberg.conversions import to_bytes
        from pyiceberg.transforms import IdentityTransform

        return {
            str(each.source_id): to_bytes(self._schema.find_type(each.source_id), value).hex()
            for each, value in zip(self._table.specs()[file.spec_id].fields, file.partition)
            if isinstance(each.transform, IdentityTransform)
            and value is not None
            and each.source_id in self._schema.field_ids
        }


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
    table_type: ClassVar[type[LakeTable]] = IcebergTable
    cleanup: ClassVar[str] = "a cleanup after expire_snapshots"
    catalog: IcebergCatalog
    table: str
    snapshot: int | str | None = None

    @property
    def place(self) -> str:
        return f"{self.catalog.name}.{self.table}"

    def load(self, url: str) -> Any:
        return self.catalog.table(self.table)

    def current(self, file: FileRecord) -> FileRecord:
        table = self.load(self.place)
        if table is None or not table.io.new_input(file.url).exists():
            raise FileNotFoundError(file.url)
        return file

    def read_rows(
        self, span: FileSpan, detail: Detail, schema: pa.Schema, location: str
    ) -> pa.Table:
        from vane_dagster.sources.iceberg_scan import rows

        def read() -> pa.Table:
            table = self._opened(detail)
            wanted = table.schemas()[detail["schema"]].select(*schema.names)
            tables = rows(table, span.url, detail["constants"], wanted, span.start, span.stop)
            return pa.concat_tables(cast_table(each, schema) for each in tables)

        return with_retries(_failpoints.failing("read", span.url, read))

    def _opened(self, detail: Detail) -> Any:
        """Return the table, loaded once for a snapshot and schema."""
        properties = sorted(revealed(self.catalog.properties).items())
        key = repr((self.catalog.name, properties, self.table))
        wanted = detail["snapshot"], detail["schema"], time.monotonic() // _REFRESH_SECONDS
        loaded, opened = _loaded.get(key, (None, None))
        if loaded != wanted:
            if (opened := self.load(self.place)) is None:
                raise FileNotFoundError(self.place)
            _loaded[key] = (wanted, opened)
        return opened


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

    A data file is computed again if the file or its delete files change. So a commit that adds
    files computes these files, a compaction recomputes the files that it has written, and a new
    delete file recomputes the data files whose positions it names. Data files in ORC or Avro are
    refused. Workers open the catalog again every five minutes, so that credentials from the catalog
    do not expire. A fragment decodes a row group from its beginning: write row groups of at most
    64 MiB.

    Args:
        catalog: The name of a catalog in pyiceberg's configuration (``.pyiceberg.yaml`` or
            ``PYICEBERG_CATALOG__*`` variables), its properties with an optional ``"name"``, or a
            ``pyiceberg.catalog.Catalog``. Workers open the catalog too. Its properties are not part
            of keys.
        table: Namespace and name of the table, such as "db.events".
        snapshot: A snapshot id, or the name of a branch or tag. By default each run reads the
            snapshot that is current when it is planned, and computes only the data files that are
            new or have new deletes.
        filter: A row filter of pyiceberg, such as ``"day = '{partition_key}'"``. A partitioned
            pipeline needs one. ``{partition_key}`` is replaced by the partition's key, and
            ``{partition_key.<dimension>}`` by one dimension of a multi-partition,
            ``{partition_start}`` and ``{partition_end}`` by the bounds of a time window. Timestamps
            without a time zone need a format, as in ``'{partition_start:%Y-%m-%dT%H:%M:%S}'``, and
            dates ``'{partition_start:%Y-%m-%d}'``.
        columns: The columns to read; all by default. A change of the schema of other columns then
            computes nothing.
        asset: The Dagster asset that writes the table: an asset key, "a/b", or a decorated asset.
        allow_empty: Whether a partition without any rows is accepted; an error by default.

    Raises:
        DefinitionError: If an argument has another form, or pyiceberg is not installed.
    """
    where = "vd.iceberg"
    return IcebergSource(
        parse_catalog(where, catalog),
        parse_identifier(where, table),
        snapshot,
        **lake_arguments(where, filter, columns, asset, allow_empty),
    )
