"""Delta tables: each publication of a partition is one transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from vane_dagster.errors import StoreError
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.publish.column_types import flat_type
from vane_dagster.storage.publish.compaction import Parts
from vane_dagster.storage.publish.table import TablePublisher
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
    module = "deltalake"
    label = "Delta table"
    altered_by = "write_deltalake with schema_mode='overwrite', or to add columns table.alter"

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

    def _active(self, table: Any) -> dict[str, Any]:
        return {unquote(path): path for path, key in self._files(table) if key == self._key}

    def _keys(self, table: Any, wanted: Sequence[str]) -> Iterable[str]:
        return [key for _, key in self._files(table)]

    def _files(self, table: Any) -> Iterator[tuple[str, Any]]:
        """Return the paths of the table's files, each with the key of its partition."""
        actions, key = pa.table(table.get_add_actions(flatten=True)), f"partition.{self._column}"
        known = actions.select([name for name in ("path", key) if name in actions.column_names])
        return ((each["path"], each.get(key)) for each in known.to_pylist())

    def _columns(self, table: Any) -> pa.Schema:
        return pa.schema(table.schema().to_arrow())

    def _partitioning(self, table: Any) -> list[str]:
        return list(table.metadata().partition_columns)

    def _replace(
        self, table: Any, gone: Mapping[str, Any], added: Mapping[str, Any], manifest: Manifest
    ) -> Any:
        from deltalake import Schema
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, CommitProperties, Transaction

        key = {self._column: self._key} if self._column else {}
        now = int(time.time() * 1000)
        actions = [
            AddAction(path, file.size, key, now, True, _statistics(file.parts, manifest.keys[0]))
            for path, file in added.items()
        ]
        # Without it Delta merges two transactions that both add the partition's first files.
        lock = Transaction(f"vane_dagster {self._key or ''}", now)
        properties = CommitProperties(self._properties(manifest), app_transactions=[lock])
        try:
            table.create_write_transaction(
                actions,
                "overwrite",
                Schema.from_arrow(self._table_schema(manifest.schema)),
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


def _statistics(parts: Parts, id: str) -> str:
    """Return a file's statistics, which let readers skip it."""
    statistics: dict[str, Any] = {
        "numRecords": sum(part.rows for part in parts),
        "nullCount": {id: 0},
    }
    low, high = min(part.id_min for part in parts), max(part.id_max for part in parts)
    return json.dumps(statistics | {"minValues": {id: low}, "maxValues": {id: high}})
