"""Publishing into tables with transactions: each publication of a partition is one of them."""

from __future__ import annotations

import abc
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster import retries
from vane_dagster._arguments import PLACEHOLDER
from vane_dagster.errors import DefinitionError, SchemaError, StoreError, VaneError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import Manifest, PartInfo, Published
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING, Publisher, column_clash
from vane_dagster.storage.publish.compaction import CompactedFile
from vane_dagster.storage.publish.target import Target

_MOVERS = 8
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MISREAD = re.compile(r"[%\\?#]")


class TablePublisher(Publisher):
    """A publisher into a table with transactions, as one partition of it or as the whole table.

    Files are moved into the table's folder, where readers do not see them until a transaction
    replaces the partition's former files. The transaction is not made again if the table has the
    files of this publication, so it is made once however often a run is interrupted.

    Attributes:
        format: The name of the format in manifests.
        label: What the format calls a table, as "Delta table".
    """

    has_folder_per_partition = False
    format: ClassVar[str]
    label: ClassVar[str]

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        self.target = Location(declared.url, declared.storage_options)
        self.staging = self.target.child(STAGING, partition_folder(partition))
        self._column = declared.partition_column
        self._key = None if partition is None else str(partition)

    @classmethod
    def validate(
        cls, declared: Target, where: str, partitioned: bool, columns: Sequence[str]
    ) -> Target:
        url, partition_column = declared.url, declared.partition_column
        if fields := PLACEHOLDER.findall(url):
            raise DefinitionError(
                f"{where}: {url!r} has {{{fields[0]}}}, but {_a(cls.label)} holds all partitions; "
                "take it out. The key stands in the column that partition_column names"
            )
        if found := _MISREAD.search(url):
            raise DefinitionError(
                f"{where}: {url!r} holds {found.group()!r}, which {cls.label.split()[0]}'s driver "
                "takes for a part of a URL; give the table another name"
            )
        if not isinstance(partition_column, str) or not _COLUMN.fullmatch(partition_column):
            raise DefinitionError(
                f"{where}: partition_column is {partition_column!r}; expected letters, digits and "
                "'_', with a letter first"
            )
        if not partitioned:
            return replace(declared, partition_column=None)
        if clash := column_clash(partition_column, columns):
            raise DefinitionError(f"{where}: {clash}")
        return declared

    def stored(self, schema: pa.Schema, location: str) -> pa.Schema:
        if clash := column_clash(self._column, schema.names):
            raise SchemaError(f"{location}: {clash}")
        fields = []
        for field in schema:
            kind = self._stored_type(field.type)
            if kind is None:
                raise SchemaError(
                    f"{location}: column {field.name!r} is {field.type}, which {_a(self.label)} "
                    "cannot hold; cast it in a project, for example to BIGINT, TIMESTAMP or VARCHAR"
                )
            fields.append(pa.field(field.name, kind))
        return pa.schema(fields)

    def check(self, schema: pa.Schema, location: str) -> None:
        if self._column:
            self._folder()
        with self._storage_errors("read"):
            table = self._opened()
            if table is not None:
                self._fit(table, schema, location)

    def planned(self, manifest: Manifest, sequence: int, former: Published | None) -> Published:
        with self._storage_errors("read"):
            active = self._active(self._opened())
        if former is not None and active is not None and active == set(former.files):
            return former
        for attempt in itertools.count():
            # A file that is or was in the table is never added again. Its name is new, unless
            # this same publication was interrupted after its transaction.
            seed = f"{manifest.content}-{sequence}-{attempt}"
            unique = hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
            files = self._names(manifest.parts, unique)
            if not active or active == set(files) or active.isdisjoint(files):
                break
        return Published(self.target.url, files, self.format)

    def publish(self, manifest: Manifest) -> Published:
        assert manifest.published is not None
        location = f"stage '{manifest.pipeline}/{manifest.stage}'"
        files = manifest.published.files
        made: Mapping[str, CompactedFile] | None = None
        for _ in retries.transactions():
            with self._storage_errors("written"):
                table = self._opened() or self._create(manifest.schema)
                self._fit(table, manifest.schema, location)
                if self._active(table) == set(files):
                    return self._published(files, table)
                if made is None:
                    made = self._place(manifest)
                if self._replace(table, manifest, made):
                    return self._published(files, table)
        raise StoreError(
            f"{self.label} {self._name!r}: other writers changed the same partition "
            f"{retries.TRANSACTION_ATTEMPTS} times while it was replaced. Run it again when they "
            "have ended"
        )

    def holds(self, files: Sequence[str]) -> bool:
        with self._storage_errors("read"):
            return self._active(self._opened()) == set(files)

    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        """Do nothing: the table's own maintenance removes files of former versions."""

    # The format

    @property
    def _name(self) -> str:
        """The table's name in messages."""
        return self.target.url

    @abc.abstractmethod
    def _stored_type(self, kind: pa.DataType) -> pa.DataType | None:
        """Return the type in which the table holds a column; None if there is none."""

    @abc.abstractmethod
    def _folder(self) -> str:
        """Return the folder of the partition's files, relative to the table's; may be empty."""

    @abc.abstractmethod
    def _opened(self) -> Any:
        """Open the current version of the table; None if there is none."""

    @abc.abstractmethod
    def _create(self, schema: pa.Schema) -> Any:
        """Create the table, unless another run has done so, and open it."""

    @abc.abstractmethod
    def _active(self, table: Any) -> set[str] | None:
        """Return the table's files for the partition; None if there is no table."""

    @abc.abstractmethod
    def _fit(self, table: Any, schema: pa.Schema, location: str) -> None:
        """Raise SchemaError if the table has other columns or partitions."""

    @abc.abstractmethod
    def _replace(self, table: Any, manifest: Manifest, made: Mapping[str, CompactedFile]) -> bool:
        """Replace the partition's files in one transaction; return False on a conflict.

        Afterwards `table` is at the new version.
        """

    @abc.abstractmethod
    def _version(self, table: Any) -> int | None:
        """Return the version of an open table."""

    # Files

    def _published(self, files: Sequence[str], table: Any) -> Published:
        return Published(self.target.url, files, self.format, self._version(table))

    def _named(self, parts: Sequence[PartInfo], unique: str) -> Iterable[tuple[Any, list[str]]]:
        """Return groups or single parts, with the paths of their files in the table."""
        folder = self._folder()
        below = f"{folder}/" if folder else ""
        rows = [part for part in parts if part.rows]
        if self._declared.target_bytes is None:
            return [(part, [f"{below}{part.name[:-8]}-{unique}.parquet"]) for part in rows]
        return [
            (bundle, [f"{below}{stem}-{unique}.parquet" for stem in bundle.stems])
            for bundle in self._compaction_groups(rows)
        ]

    def _names(self, parts: Sequence[PartInfo], unique: str) -> list[str]:
        return [name for _, named in self._named(parts, unique) for name in named]

    def _place(self, manifest: Manifest) -> Mapping[str, CompactedFile]:
        """Move the files into the table's folder, where readers do not see them yet."""
        assert manifest.published is not None
        if not manifest.published.files:
            return {}
        unique = manifest.published.files[0][: -len(".parquet")].rpartition("-")[2]
        named = list(self._named(manifest.parts, unique))
        if self._declared.target_bytes is not None:
            return self._write(named, manifest)
        self._require_staged(part for part, _ in named)
        sizes = self.staging.names()
        with ThreadPoolExecutor(max_workers=_MOVERS) as threads:
            list(threads.map(self._move, named))
        return {
            name: CompactedFile(sizes[part.name], part.rows, part.id_min, part.id_max)
            for part, (name,) in named
        }

    def _move(self, item: tuple[PartInfo, list[str]]) -> None:
        part, (path,) = item
        folder, _, name = path.rpartition("/")
        place = self.target.child(folder) if folder else self.target
        self.staging.move(part.name, place, name)

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


def _a(label: str) -> str:
    return f"an {label}" if label[0] in "AEIOU" else f"a {label}"
