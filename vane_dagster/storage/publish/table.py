"""Publishing into tables with transactions: each publication of a partition is one of them."""

from __future__ import annotations

import abc
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster import retries
from vane_dagster._arguments import PLACEHOLDER, check_installed, text
from vane_dagster._texts import listed
from vane_dagster.errors import DefinitionError, SchemaError, StoreError, VaneError
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo, Published
from vane_dagster.storage.publish.base import Publisher
from vane_dagster.storage.publish.column_types import held_type
from vane_dagster.storage.publish.compaction import Parts, PlacedFile, plan_compaction
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.table_options import check_table_url

_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class TablePublisher(Publisher):
    """A publisher into a table with transactions, as one partition of it or as the whole table.

    Files are written or moved into the table's folder, where readers do not see them until a
    transaction replaces the partition's former files. A file's name says which parts it was made
    of. There is no transaction if the partition's files in the table are those made of its parts,
    so it is made once however often a run is interrupted.

    Attributes:
        format: The name of the format in manifests, and of the package's extra.
        module: The module of its library.
        label: What the format calls a table, such as "Delta table".
        schemes: The schemes of URLs that the format's driver opens, besides local paths.
        altered_by: The calls of the format's library that change a table's columns.
        suffix: The suffix of the table's files.
        keeps_files: Whether a transaction leaves files of unchanged parts in the table.
        keeps_size: Whether vectors keep their size in the table.
    """

    has_folder_per_partition = False
    format: ClassVar[str]
    module: ClassVar[str]
    label: ClassVar[str]
    schemes: ClassVar[Sequence[str]] = ("s3", "s3a")
    altered_by: ClassVar[str]
    suffix: ClassVar[str] = ".parquet"
    keeps_files: ClassVar[bool] = False
    keeps_size: ClassVar[bool] = False

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        self.target = StoragePath(declared.url, declared.storage_options)
        self._column = declared.partition_column
        self._key = None if partition is None else str(partition)

    @classmethod
    def validate(cls, declared: Target, where: str, partitioned: bool) -> Target:
        check_installed(f"{where}: format={cls.format!r}", cls.module, cls.format)
        url, partition_column = declared.url, declared.partition_column
        if fields := PLACEHOLDER.findall(url):
            raise DefinitionError(
                f"{where}: {url!r} has {{{fields[0]}}}, but the {cls.label} holds all partitions; "
                "remove it. The column named by partition_column has the key"
            )
        check_table_url(where, url, cls.label.split()[0], cls.schemes)
        expected = "letters, digits and '_', with a letter first"
        text(where, "partition_column", partition_column, expected, _COLUMN)
        return declared if partitioned else replace(declared, partition_column=None)

    def stored(self, schema: pa.Schema, location: str) -> pa.Schema:
        fields, refused = [], []
        for field in schema:
            if self._column and field.name.lower() == self._column.lower():
                raise SchemaError(
                    f"{location}: the rows have a column {field.name!r}, and the table needs "
                    f"{self._column!r} for the partition's key; give partition_column another "
                    "name, or rename the rows' column in a project"
                )
            kind = self.stored_type(field.type)
            if kind is None:
                refused.append(f"column {field.name!r} is {field.type}")
            else:
                fields.append(pa.field(field.name, kind))
        if refused:
            raise SchemaError(
                f"{location}: {listed(refused, 10)}, which the {self.label} cannot hold; cast in a "
                "project, for example to BIGINT, TIMESTAMP or VARCHAR"
            )
        return pa.schema(fields)

    def check(self, schema: pa.Schema, location: str) -> None:
        self._prefix()
        with self._storage_errors("read"):
            table = self._opened()
            if table is not None:
                self._fit(table, schema, location)

    def publish(self, manifest: Manifest) -> Published:
        location = f"stage '{manifest.pipeline}/{manifest.stage}'"
        written = (part for part in manifest.parts if part.rows)
        groups = plan_compaction(written, self._declared.target_bytes)
        # A name is never used again: former versions of the table may have it.
        end = f"-{secrets.token_hex(8)}{self.suffix}"
        paths = {stem: f"{self._prefix()}{stem}{end}" for stem in groups}
        made: dict[str, Any] = {}
        for _ in retries.transactions():
            with self._storage_errors("written"):
                table = self._opened()
                if table is None:
                    table = self._created(manifest.schema)
                self._fit(table, manifest.schema, location)
                active = self._active(table)
                there = self._by_stem(active)
                if len(active) == len(groups) and there.keys() == groups.keys():
                    return self._published([there[stem] for stem in groups], table)
                kept = {s: file for s, file in there.items() if self.keeps_files and s in groups}
                added = {paths[s]: parts for s, parts in groups.items() if s not in kept}
                missing = {path: parts for path, parts in added.items() if path not in made}
                made |= self._place(table, manifest, missing)
                gone = {file: active[file] for file in active.keys() - kept.values()}
                new = {path: made[path] for path in added}
                changed = self._replace(table, gone, new, manifest)
                if changed is not None:
                    return self._published([*(paths | kept).values()], changed)
        raise StoreError(
            f"{self.label} {self._name!r}: other writers changed the same partition "
            f"{retries.TRANSACTION_ATTEMPTS} times while it was replaced. Run it again when they "
            "have ended"
        )

    def holds(self, files: Sequence[str]) -> bool:
        with self._storage_errors("read"):
            table = self._opened()
            return table is not None and self._active(table).keys() == set(files)

    def present(self, partitions: Sequence[str | None]) -> Iterable[str | None]:
        with self._storage_errors("read"):
            table = self._opened()
            if table is None:
                return ()
            if not self._column:
                return partitions if self._active(table) else ()
            is_ours = self._partitioning(table) in (None, [self._column])
            is_ours = is_ours and self._column in self._columns(table).names
            return self._keys(table, [*map(str, partitions)]) if is_ours else ()

    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        """Do nothing: the table's own maintenance removes files of former versions."""

    # The format

    @property
    def _name(self) -> str:
        """The table's name in messages."""
        return self.target.url

    @staticmethod
    @abc.abstractmethod
    def _flat_type(kind: pa.DataType) -> pa.DataType | None:
        """Return the type of a column of the table that is not nested; None without one."""

    @classmethod
    def stored_type(cls, kind: pa.DataType) -> pa.DataType | None:
        """Return the type in which the table holds a column without loss; None without one."""
        return held_type(kind, cls._flat_type, cls.keeps_size)

    def _shape(self, schema: pa.Schema) -> dict[str, str]:
        """Return column names and types of a table, for messages and comparison."""
        return {
            field.name: f"{self.stored_type(field.type)}{'' if field.nullable else ' not null'}"
            for field in schema
        }

    @abc.abstractmethod
    def _prefix(self) -> str:
        """Return the beginning of the paths of the partition's files, relative to the table."""

    @abc.abstractmethod
    def _opened(self) -> Any:
        """Open the current version of the table; None if there is none."""

    @abc.abstractmethod
    def _create(self, schema: pa.Schema) -> None:
        """Create the table without rows, with the columns of `_table_schema`."""

    @abc.abstractmethod
    def _active(self, table: Any) -> dict[str, Any]:
        """Return the table's files for the partition, by path."""

    @abc.abstractmethod
    def _keys(self, table: Any, wanted: Sequence[str]) -> Iterable[str]:
        """Return the partitions with rows in the table: at least those of some."""

    @abc.abstractmethod
    def _columns(self, table: Any) -> pa.Schema:
        """Return the columns of the table."""

    def _partitioning(self, table: Any) -> list[str] | None:
        """Return the columns that the table is partitioned by; None if it has no partitions."""
        return None

    @abc.abstractmethod
    def _replace(
        self, table: Any, gone: Mapping[str, Any], added: Mapping[str, Any], manifest: Manifest
    ) -> Any:
        """Replace files of the partition in one transaction.

        Return the table at the new version; None on a conflict with another writer.
        """

    @abc.abstractmethod
    def _version(self, table: Any) -> int | None:
        """Return the version of an open table."""

    def _fit(self, table: Any, schema: pa.Schema, location: str) -> None:
        """Raise SchemaError if the table has other columns or partitions."""
        columns = [self._column] if self._column else []
        if (partitioning := self._partitioning(table)) not in (None, columns):
            raise SchemaError(
                f"{location}: {self.label} {self._name!r} is partitioned by {partitioning}, "
                f"expected {columns}. Publish into another table"
            )
        wanted, there = self._shape(self._table_schema(schema)), self._shape(self._columns(table))
        for name in dict.fromkeys([*wanted, *there]):
            if wanted.get(name) != there.get(name):
                raise SchemaError(
                    f"{location}: column {name!r} is {wanted.get(name, 'no column')} here, but "
                    f"{there.get(name, 'no column')} in the {self.label} {self._name!r}. Make the "
                    f"rows fit with a project, change the table ({self.altered_by}), or publish "
                    "into another one"
                )

    def _properties(self, manifest: Manifest) -> dict[str, str]:
        """Return what a transaction records of its publication."""
        properties = {
            "vane_dagster.stage": f"{manifest.pipeline}/{manifest.stage}",
            "vane_dagster.run_id": manifest.run_id,
        }
        return (
            properties if self._key is None else {**properties, "vane_dagster.partition": self._key}
        )

    def _table_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns of the table: those of the rows, and the partition's key."""
        return schema.append(pa.field(self._column, pa.string())) if self._column else schema

    def _created(self, schema: pa.Schema) -> Any:
        try:
            self._create(self._table_schema(schema))
        except Exception:  # another run may have created it at the same time
            if self._opened() is None:
                raise
        return self._opened()

    # Files

    def _published(self, files: Sequence[str], table: Any) -> Published:
        return Published(self.target.url, files, self.format, self._version(table))

    def _by_stem(self, files: Iterable[str]) -> dict[str, str]:
        """Return the paths that this class gives to files, by the stems that they contain."""
        prefix = self._prefix()
        return {f[len(prefix) :].rpartition("-")[0]: f for f in files if f.startswith(prefix)}

    def _place(
        self, table: Any, manifest: Manifest, named: Mapping[str, Parts]
    ) -> Mapping[str, Any]:
        """Bring files, given with their parts, into the table's folder; readers do not see them."""
        if self._declared.target_bytes is not None:
            return self._write(named, manifest)
        self._require_staged(part for group in named.values() for part in group)
        sizes = self.staging.names()
        in_threads(lambda path: self._move(path, named[path][0]), named)
        return {path: PlacedFile(sizes[parts[0].name], parts) for path, parts in named.items()}

    def _move(self, path: str, part: PartInfo) -> None:
        folder, _, name = path.rpartition("/")
        self.staging.move(part.name, self.target.child(folder), name)

    @contextmanager
    def _storage_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except VaneError:
            raise
        except Exception as error:  # drivers raise plain exceptions too
            raise StoreError(
                f"{self.label} {self._name!r} cannot be {verb}: {type(error).__name__}: "
                f"{error}. Check that the credentials reach it and that nothing else writes there"
            ) from error
