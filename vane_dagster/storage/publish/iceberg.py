"""Iceberg tables: each publication of a partition is one snapshot."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from vane_dagster.errors import DefinitionError
from vane_dagster.storage.filesystem import StoragePath, in_threads, protocol_of
from vane_dagster.storage.iceberg_catalog import IcebergCatalog, parse_catalog, parse_identifier
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.publish.column_types import flat_type
from vane_dagster.storage.publish.compaction import PlacedFile
from vane_dagster.storage.publish.table import TablePublisher
from vane_dagster.storage.publish.target import Target

_WIDER = {
    pa.int8(): pa.int32(), pa.int16(): pa.int32(), pa.uint8(): pa.int32(), pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(), pa.float16(): pa.float32(), pa.time32("ms"): pa.time64("us"),
}  # fmt: skip
_HELD = {
    pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.binary(),
    pa.date32(), pa.time64("us"),
}  # fmt: skip


class IcebergPublisher(TablePublisher):
    """A publisher into an Iceberg table, as one partition of it or as the whole table.

    The files have no field ids: the table's name mapping says which column is which field.
    """

    format = "iceberg"
    module = "pyiceberg"
    label = "Iceberg table"
    schemes = ("s3", "s3a", "gs", "gcs", "abfs", "abfss")
    altered_by = "pyiceberg's table.update_schema()"
    options: ClassVar[Mapping[str, Any]] = {"catalog": None, "table": None}

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        self._catalog = IcebergCatalog(declared.options["catalog"], declared.connection)
        self._identifier = str(declared.options["table"])
        if protocol_of(declared.url) != "file":
            options = self._catalog.storage_options(declared.storage_options)
            self.target = StoragePath(declared.url, options)

    @classmethod
    def validate(cls, declared: Target, where: str, partitioned: bool) -> Target:
        if declared.options["catalog"] is None or declared.options["table"] is None:
            raise DefinitionError(
                f"{where}: format='iceberg' needs catalog and table: write({declared.url!r}, "
                'format="iceberg", catalog="prod", table="db.labels"); the URL is the folder of '
                "the table's files"
            )
        catalog = parse_catalog(where, declared.options["catalog"])
        table = parse_identifier(where, declared.options["table"])
        declared = replace(
            declared,
            options={"catalog": catalog.name, "table": table},
            connection=catalog.properties,
        )
        return super().validate(declared, where, partitioned)

    @property
    def _name(self) -> str:
        return f"{self._catalog.name}.{self._identifier}"

    @staticmethod
    def _flat_type(kind: pa.DataType) -> pa.DataType | None:
        return kind if pa.types.is_fixed_size_binary(kind) else flat_type(kind, _HELD, _WIDER)

    def _prefix(self) -> str:
        return "data/"

    # The table

    def _opened(self) -> Any:
        return self._catalog.table(self._identifier)

    def _create(self, schema: pa.Schema) -> None:
        catalog = self._catalog.open()
        namespace = self._identifier.rpartition(".")[0]
        try:
            catalog.create_namespace_if_not_exists(namespace)
        except Exception:  # another stage or run may have created it at the same time
            if not catalog.namespace_exists(namespace):
                raise
        with catalog.create_table_transaction(
            self._identifier, schema, location=self._base
        ) as transaction:
            if self._column:
                with transaction.update_spec() as spec:
                    spec.add_identity(self._column)
            _map_names(transaction)

    def _active(self, table: Any) -> dict[str, Any]:
        spec, below = table.spec().spec_id, f"{self._base}/"
        planned = table.scan(row_filter=self._predicate).plan_files()
        own = (task.file for task in planned if task.file.spec_id == spec)
        return {file.file_path.removeprefix(below): file for file in own}

    def _keys(self, table: Any, wanted: Sequence[str]) -> Iterable[str]:
        spec = table.spec().spec_id
        files = (task.file for task in table.scan().plan_files())
        return {file.partition[0] for file in files if file.spec_id == spec}

    @property
    def _predicate(self) -> Any:
        """The filter of the partition's rows."""
        from pyiceberg.expressions import AlwaysTrue, EqualTo, Reference
        from pyiceberg.expressions.literals import literal

        if not self._column:
            return AlwaysTrue()
        return EqualTo(term=Reference(self._column), value=literal(str(self._key)))

    def _columns(self, table: Any) -> pa.Schema:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        return schema_to_pyarrow(table.schema(), include_field_ids=False)

    def _partitioning(self, table: Any) -> list[str]:
        from pyiceberg.transforms import IdentityTransform

        named = [(f, table.schema().find_column_name(f.source_id)) for f in table.spec().fields]
        return [
            name if isinstance(field.transform, IdentityTransform) else f"{field.transform}({name})"
            for field, name in named
        ]

    def _replace(
        self, table: Any, gone: Mapping[str, Any], added: Mapping[str, Any], manifest: Manifest
    ) -> Any:
        from pyiceberg.exceptions import (
            CommitFailedException,
            CommitStateUnknownException,
            ValidationException,
        )

        transaction = table.transaction()
        _map_names(transaction)
        new = in_threads(lambda item: self._data_file(table, *item), added.items())
        properties = self._properties(manifest)
        try:
            with transaction.update_snapshot(properties).overwrite() as snapshot:
                # Other writers of this partition, and no others, are a conflict.
                snapshot.delete_by_predicate(self._predicate)
                for file in gone.values():
                    snapshot.delete_data_file(file)
                for file in new:
                    snapshot.append_data_file(file)
            transaction.commit_transaction()
        except (CommitFailedException, CommitStateUnknownException, ValidationException):
            return None
        return table

    def _data_file(self, table: Any, name: str, file: PlacedFile) -> Any:
        """Describe a file for a manifest, with the statistics of its footer."""
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        with self.target.fs.open(self.target.file(name), "rb") as stream:
            footer = pq.read_metadata(stream)
        statistics = data_file_statistics_from_parquet_metadata(
            footer,
            compute_statistics_plan(table.schema(), table.properties),
            parquet_path_to_id_mapping(table.schema()),
        )
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{self._base}/{name}",
            file_format=FileFormat.PARQUET,
            partition=Record(self._key) if self._column else Record(),
            file_size_in_bytes=file.size,
            sort_order_id=None,
            spec_id=table.spec().spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    def _version(self, table: Any) -> int | None:
        snapshot = table.current_snapshot()
        return None if snapshot is None else int(snapshot.snapshot_id)

    @functools.cached_property
    def _base(self) -> str:
        """The URL of the table's folder, as it is in the table's metadata."""
        return f"file://{self.target.path}" if self.target.is_local else self.target.url.rstrip("/")


def _map_names(transaction: Any) -> None:
    """Store the table's name mapping, if it has none: field ids by column names."""
    from pyiceberg.table import TableProperties

    metadata = transaction.table_metadata
    if metadata.name_mapping() is None:
        mapping = metadata.schema().name_mapping.model_dump_json()
        transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
