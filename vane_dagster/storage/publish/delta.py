"""Delta tables: each publication of a partition is one transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from vane_dagster._arguments import check_installed
from vane_dagster.errors import SchemaError, StoreError
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.publish.column_types import flat_type
from vane_dagster.storage.publish.compaction import CompactedFile
from vane_dagster.storage.publish.table import TablePublisher
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.table_options import driver_options, driver_url

_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
}  # fmt: skip
_HELD = {
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.binary(), pa.date32(),
}  # fmt: skip


class DeltaPublisher(TablePublisher):
    """A publisher into a Delta table, as one partition of it or as the whole table."""

    format = "delta"
    label = "Delta table"
    altered_by = "deltalake's table.alter"

    @classmethod
    def validate(cls, declared: Target, where: str, partitioned: bool) -> Target:
        check_installed(f"{where}: format='delta'", "deltalake", "delta")
        return super().validate(declared, where, partitioned)

    @staticmethod
    def _flat_type(kind: pa.DataType) -> pa.DataType | None:
        return (
            pa.binary() if pa.types.is_fixed_size_binary(kind) else flat_type(kind, _HELD, _WIDER)
        )

    def _prefix(self) -> str:
        """Return the folder of the partition in the table, named as every Delta writer does."""
        if not self._column:
            return ""
        if self._key == "":
            raise StoreError(
                f"Delta table {self.target.url!r}: the empty text cannot be the key of a "
                "partition, as Delta takes it for null; give the partition another key"
            )
        return f"{self._column}={quote(self._key or '', safe='')}/"

    def _opened(self) -> Any:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(driver_url(self.target), storage_options=driver_options(self.target))
        except TableNotFoundError:
            return None

    def _create(self, schema: pa.Schema) -> None:
        from deltalake import DeltaTable, Schema

        DeltaTable.create(
            driver_url(self.target),
            Schema.from_arrow(schema),
            partition_by=[self._column] if self._column else [],
            storage_options=driver_options(self.target),
        )

    def _active(self, table: Any) -> dict[str, Any] | None:
        if table is None:
            return None
        actions = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
        paths = actions.column("path").to_pylist()
        if self._column:
            name = f"partition.{self._column}"
            if name not in actions.column_names:
                return {unquote(path): path for path in paths}
            keys = actions.column(name).to_pylist()
            paths = [path for path, key in zip(paths, keys) if key == self._key]
        return {unquote(path): path for path in paths}

    def _fit(self, table: Any, schema: pa.Schema, location: str) -> None:
        columns = [self._column] if self._column else []
        if (found := list(table.metadata().partition_columns)) != columns:
            raise SchemaError(
                f"{location}: Delta table {self.target.url!r} is partitioned by {found}, expected "
                f"{columns}. Publish into another table"
            )
        wanted = _delta_types(self._delta_schema(schema))
        self._require_columns(location, wanted, _delta_types(table.schema()))

    def _replace(
        self, table: Any, gone: Mapping[str, Any], added: Mapping[str, Any], manifest: Manifest
    ) -> Any:
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, CommitProperties, Transaction

        key = {self._column: self._key} if self._column else {}
        now = int(time.time() * 1000)
        actions = [
            AddAction(path, file.size, key, now, True, _statistics(file, manifest.keys[0]))
            for path, file in added.items()
        ]
        # Without it Delta merges two transactions that both add the partition's first files.
        lock = Transaction(f"vane_dagster {self._key or ''}", now)
        properties = CommitProperties(self._properties(manifest), app_transactions=[lock])
        try:
            table.create_write_transaction(
                actions,
                "overwrite",
                self._delta_schema(manifest.schema),
                partition_by=list(key),
                partition_filters=[(self._column, "=", self._key)] if key else None,
                commit_properties=properties,
            )
        except CommitFailedError:
            return None
        table.update_incremental()
        return table

    def _version(self, table: Any) -> int | None:
        version: int = table.version()
        return version

    def _delta_schema(self, schema: pa.Schema) -> Any:
        from deltalake import Schema

        return Schema.from_arrow(self._table_schema(schema))


def _statistics(file: CompactedFile, id: str) -> str:
    """Return a file's statistics, which let readers skip it."""
    found: dict[str, Any] = {"numRecords": file.rows, "nullCount": {id: 0}}
    if file.id_min is not None:
        found |= {"minValues": {id: file.id_min}, "maxValues": {id: file.id_max}}
    return json.dumps(found)


def _delta_types(schema: Any) -> dict[str, str]:
    """Return column names and types of a Delta schema, for messages and comparison."""
    fields = json.loads(schema.to_json())["fields"]
    return {
        field["name"]: (
            json.dumps(field["type"], sort_keys=True).strip('"')
            + ("" if field["nullable"] else " not null")
        )
        for field in fields
    }
