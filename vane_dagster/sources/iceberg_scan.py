"""Scan tasks of pyiceberg, as a span's detail records them, and how a worker reads their rows.

pyiceberg 0.12 reads the whole file of a task, and null lists of structs as empty ones. Workers call
copies of its functions that read some row groups of the file, and keep the nulls. So a fragment
costs the time and memory of its own row groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vane_dagster.errors import SourceError
from vane_dagster.retries import with_retries
from vane_dagster.sources.lake_source import Mask, SpanDetail
from vane_dagster.sources.parquet_scan import groups_between
from vane_dagster.storage.iceberg_catalog import IcebergCatalog, iceberg_errors

_POSITION = "__position"


@dataclass(frozen=True)
class TaskDetail(SpanDetail):
    """A scan task of pyiceberg without its deletes and its data file's statistics.

    Attributes:
        snapshot: The snapshot in which the task was planned.
        schema: The schema by which the file is read.
        spec: The partition spec of the file.
        partition: Values of identity transforms, in Iceberg's binary form as hex digits.
    """

    snapshot: int
    schema: int
    spec: int
    partition: Sequence[str | None]


def open_table(catalog: IcebergCatalog, table: str, location: str) -> Any:
    """Load the current metadata of a table."""
    what = f"{location}: Iceberg table {table!r} of catalog {catalog.name!r}"
    with iceberg_errors(f"{what} cannot be read", SourceError):
        found = with_retries(functools.partial(catalog.table, table))
    if found is None:
        raise SourceError(f"{what} does not exist. Check its name, or create it first")
    return found


def with_schema(table: Any, schema_id: int | None) -> Any:
    """Return the metadata of a table in which one of its schemas is the current one."""
    if schema_id is None or schema_id == table.metadata.current_schema_id:
        return table.metadata
    if schema_id not in table.schemas():
        raise SourceError(
            f"Iceberg table {'.'.join(table.name())!r} no longer has schema {schema_id}, by which "
            "this snapshot was planned; run the partition again"
        )
    return table.metadata.model_copy(update={"current_schema_id": schema_id})


def tested_ids(schema: Any, where: str | None) -> list[int]:
    """Return the ids of a filter's columns: a name may have been another column's."""
    from pyiceberg.expressions.parser import parse
    from pyiceberg.expressions.visitors import bind, extract_field_ids

    if where is None:
        return []
    return sorted(extract_field_ids(bind(schema, parse(where), case_sensitive=True)))


class ScanTask:
    """A scan task of pyiceberg, made from its detail."""

    def __init__(self, table: Any, url: str, detail: TaskDetail) -> None:
        from pyiceberg.conversions import from_bytes
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.table import FileScanTask
        from pyiceberg.typedef import Record

        self._io, self._url = table.io, url
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
        self._task = FileScanTask(file)

    def rows(self, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        """Read rows by their positions in the file, also those that are deleted."""
        found = [schema.empty_table()]
        for at, batch in self._batches(schema.names, start, stop):
            first, last = max(0, start - at), min(batch.num_rows, stop - at)
            if first < last:
                table = pa.Table.from_batches([batch.slice(first, last - first)])
                found.append(table.select(schema.names).cast(schema))
            if at + batch.num_rows >= stop:
                break
        return pa.concat_tables(found)

    def passing(self, where: str, rows: int) -> Mask:
        """Return which rows pass a filter, by reading its columns."""
        from pyiceberg.expressions.parser import parse
        from pyiceberg.expressions.visitors import bind
        from pyiceberg.io.pyarrow import expression_to_pyarrow

        passing = bind(self._schema, parse(where), case_sensitive=True)
        expression = expression_to_pyarrow(passing, self._schema)
        ids = tested_ids(self._schema, where)
        paths = [f"{self._schema.find_column_name(id)}." for id in ids]
        fields = [each.name for each in self._schema.fields]  # a name may have a dot
        names = [name for name in fields if any(path.startswith(f"{name}.") for path in paths)]
        mask = np.zeros(rows, bool)
        for at, batch in self._batches(names, 0, rows):
            positions = pa.array(np.arange(at, at + batch.num_rows))
            table = pa.Table.from_batches([batch]).append_column(_POSITION, positions)
            mask[table.filter(expression).column(_POSITION).to_numpy()] = True
        return mask

    def footer(self) -> pq.FileMetaData:
        """Return the file's Parquet metadata."""
        with self._io.new_input(self._url).open() as stream:
            return pq.read_metadata(stream)

    def _batches(
        self, names: Sequence[str], start: int, stop: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read the row groups with some rows, batch by batch, each with its first row."""
        import pyarrow.dataset as ds  # imports pandas if it is installed
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io import pyarrow as library

        at = start

        def fragment(format: ds.ParquetFileFormat, stream: Any) -> ds.ParquetFileFragment:
            nonlocal at
            whole = format.make_fragment(stream)
            counts = (group.num_rows for group in whole.row_groups)
            groups, at, _ = groups_between(counts, start, stop)
            return whole.subset(row_group_ids=groups)

        def file_format(kind: Any, **options: Any) -> SimpleNamespace:
            own = ds.ParquetFileFormat(**options)
            return SimpleNamespace(make_fragment=functools.partial(fragment, own))

        # Copies of the library's functions, which differ in the two names.
        known = {
            **vars(library),
            "_get_file_format": file_format,
            "ArrowProjectionVisitor": _projection(),
        }
        for function in (
            library._to_requested_schema,
            library._task_to_record_batches,
            library.ArrowScan._record_batches_from_scan_tasks_and_deletes,
        ):
            name, defaults = function.__name__, function.__defaults__
            read = known[name] = FunctionType(function.__code__, known, name, defaults)
        wanted = self._schema.select(*names)
        for batch in read(
            library.ArrowScan(self._metadata, self._io, wanted, AlwaysTrue()), [self._task], {}
        ):
            yield at, batch
            at += batch.num_rows


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
