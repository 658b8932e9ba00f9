"""Delta tables: each publication of a partition is one transaction."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from vane_dagster._arguments import PLACEHOLDER
from vane_dagster.errors import DefinitionError, SchemaError, StoreError, VaneError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import Manifest, PartInfo, Published
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING, Publisher, Target
from vane_dagster.storage.publish.compaction import CompactedFile
from vane_dagster.storage.publish.delta_types import delta_type, shape
from vane_dagster.storage.table_options import table_options

_ATTEMPTS = 12
_MOVERS = 8
_MAX_NAME_LENGTH = 255
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_PROTOCOL = re.compile(r"(?:(file|s3|s3a)://)?(?![A-Za-z][A-Za-z0-9+.\-]*://)")
_MISREAD = re.compile(r"[%\\?#]")


class DeltaPublisher(Publisher):
    """A publisher into a Delta table, as one partition of it or as the whole table."""

    has_folder_per_partition = False

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
        if find_spec("deltalake") is None:
            raise DefinitionError(
                f"{where}: format='delta' needs the package deltalake. Install vane-dagster[delta]"
            )
        if fields := PLACEHOLDER.findall(url):
            raise DefinitionError(
                f"{where}: {url!r} has {{{fields[0]}}}, but a Delta table holds all partitions; "
                "take it out. The key stands in the column that partition_column names"
            )
        if not _PROTOCOL.match(url):
            raise DefinitionError(
                f"{where}: {url!r} cannot be a Delta table; expected a local path or s3://"
            )
        if found := _MISREAD.search(url):
            raise DefinitionError(
                f"{where}: {url!r} holds {found.group()!r}, which Delta's driver takes for a part "
                "of a URL; give the table another name"
            )
        if not isinstance(partition_column, str) or not _COLUMN.fullmatch(partition_column):
            raise DefinitionError(
                f"{where}: partition_column is {partition_column!r}; expected letters, digits and "
                "'_', with a letter first"
            )
        if not partitioned:
            return replace(declared, partition_column=None)
        if clash := _clash(partition_column, columns):
            raise DefinitionError(f"{where}: {clash}")
        return declared

    def stored(self, schema: pa.Schema, location: str) -> pa.Schema:
        if clash := _clash(self._column, schema.names):
            raise SchemaError(f"{location}: {clash}")
        fields = []
        for field in schema:
            kind = delta_type(field.type)
            if kind is None:
                raise SchemaError(
                    f"{location}: column {field.name!r} is {field.type}, which a Delta table "
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
        return Published(self.target.url, files, "delta")

    def publish(self, manifest: Manifest) -> Published:
        assert manifest.published is not None
        location = f"stage '{manifest.pipeline}/{manifest.stage}'"
        files = manifest.published.files
        made: Mapping[str, CompactedFile] | None = None
        for attempt in range(_ATTEMPTS):
            with self._storage_errors("written"):
                table = self._opened() or self._create(manifest.schema)
                self._fit(table, manifest.schema, location)
                if self._active(table) == set(files):
                    return Published(self.target.url, files, "delta", table.version())
                if made is None:
                    made = self._place(manifest)
                if self._replace(table, manifest, made):
                    table.update_incremental()
                    return Published(self.target.url, files, "delta", table.version())
            time.sleep(random.uniform(0, 0.05 * 2 ** min(attempt, 6)))
        raise StoreError(
            f"Delta table {self.target.url!r}: other writers changed the same partition "
            f"{_ATTEMPTS} times while it was replaced. Run it again when they have ended"
        )

    def holds(self, files: Sequence[str]) -> bool:
        with self._storage_errors("read"):
            return self._active(self._opened()) == set(files)

    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        """Do nothing: the transaction and Delta's vacuum remove files."""

    def _folder(self) -> str:
        """Return the folder of the partition in the table, named as every Delta writer does."""
        if self._key == "":
            raise StoreError(
                f"Delta table {self.target.url!r}: the empty text cannot be the key of a "
                "partition, as Delta takes it for null; give the partition another key"
            )
        folder = f"{self._column}={quote(self._key or '', safe='')}"
        if len(folder) > _MAX_NAME_LENGTH:
            raise StoreError(
                f"Delta table {self.target.url!r}: the partition's key {self._key!r} is too long "
                f"for the name of a folder, {len(folder)} bytes where {_MAX_NAME_LENGTH} are "
                "possible"
            )
        return folder

    def _named(self, parts: Sequence[PartInfo], unique: str) -> Iterable[tuple[Any, list[str]]]:
        """Return groups or single parts, with the paths of their files in the table."""
        below = f"{self._folder()}/" if self._column else ""
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

    # The table

    def _opened(self) -> Any:
        """Open the current version of the table; None if there is none."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self._url, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _create(self, schema: pa.Schema) -> Any:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            DeltaTable.create(
                self._url,
                self._delta_schema(schema),
                partition_by=[self._column] if self._column else [],
                storage_options=self._options,
            )
        except DeltaError:  # another run may have created it at the same time
            if (table := self._opened()) is None:
                raise
            return table
        return self._opened()

    def _active(self, table: Any) -> set[str] | None:
        """Return the table's files for the partition; None if there is no table."""
        if table is None:
            return None
        actions = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
        paths = actions.column("path").to_pylist()
        if self._column:
            name = f"partition.{self._column}"
            if name not in actions.column_names:
                return set() if not paths else {unquote(path) for path in paths}
            keys = actions.column(name).to_pylist()
            paths = [path for path, key in zip(paths, keys) if key == self._key]
        return {unquote(path) for path in paths}

    def _fit(self, table: Any, schema: pa.Schema, location: str) -> None:
        """Raise SchemaError if the table has other columns or partitions."""
        columns = [self._column] if self._column else []
        if (found := list(table.metadata().partition_columns)) != columns:
            raise SchemaError(
                f"{location}: Delta table {self.target.url!r} is partitioned by {found}, expected "
                f"{columns}. Publish into another table"
            )
        wanted, there = shape(self._delta_schema(schema)), shape(table.schema())
        for name in dict.fromkeys([*wanted, *there]):
            if wanted.get(name) != there.get(name):
                raise SchemaError(
                    f"{location}: column {name!r} is {wanted.get(name, 'no column')} here, but "
                    f"{there.get(name, 'no column')} in the Delta table {self.target.url!r}. Make "
                    "the rows fit with a project, change the table (deltalake's table.alter), or "
                    "publish into another one"
                )

    def _replace(self, table: Any, manifest: Manifest, made: Mapping[str, CompactedFile]) -> bool:
        """Replace the partition's files in one transaction; return False on a conflict."""
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, CommitProperties

        key = {self._column: self._key} if self._column else {}
        now = int(time.time() * 1000)
        actions = [
            AddAction(path, file.size, key, now, True, _statistics(file, manifest.keys[0]))
            for path, file in made.items()
        ]
        properties = {"vane_dagster.stage": f"{manifest.pipeline}/{manifest.stage}"}
        properties["vane_dagster.run_id"] = manifest.run_id
        try:
            table.create_write_transaction(
                actions,
                "overwrite",
                self._delta_schema(manifest.schema),
                partition_by=list(key),
                partition_filters=[(self._column, "=", self._key)] if key else None,
                commit_properties=CommitProperties(custom_metadata=properties),
            )
        except CommitFailedError:
            return False
        return True

    def _delta_schema(self, schema: pa.Schema) -> Any:
        from deltalake import Schema

        if self._column:
            schema = schema.append(pa.field(self._column, pa.string()))
        return Schema.from_arrow(schema)

    @functools.cached_property
    def _url(self) -> str:
        return self.target.path if self.target.is_local else self.target.url.rstrip("/")

    @functools.cached_property
    def _options(self) -> dict[str, str] | None:
        return None if self.target.is_local else table_options(self.target)

    @contextmanager
    def _storage_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except VaneError:
            raise
        except Exception as error:  # the driver raises plain exceptions too
            raise StoreError(
                f"Delta table {self.target.url!r} cannot be {verb}: {type(error).__name__}: "
                f"{error}. Check that the credentials reach it and that nothing else writes there"
            ) from error


def _clash(column: str | None, columns: Iterable[str]) -> str | None:
    """Describe the row column that has the name of the partition column, if any."""
    for name in columns:
        if column and name.lower() == column.lower():
            return (
                f"the rows have a column {name!r}, and the table needs {column!r} for the "
                "partition's key; give partition_column another name, or rename the rows' column "
                "in a project"
            )
    return None


def _statistics(file: CompactedFile, id: str) -> str:
    """Return a file's statistics, which let readers skip it."""
    found: dict[str, Any] = {"numRecords": file.rows, "nullCount": {id: 0}}
    if file.id_min is not None:
        found |= {"minValues": {id: file.id_min}, "maxValues": {id: file.id_max}}
    return json.dumps(found)
