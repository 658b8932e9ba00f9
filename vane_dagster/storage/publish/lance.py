"""Lance tables: each publication of a partition is one commit.

A file of the table holds rows of one partition. Its name says which, and which parts it was made
of, so a publication leaves the files of unchanged parts in the table, and a run recognizes its own
commit. Rows that others have written or rewritten, as a compaction does, are found by the column
with the partition's key.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from vane_dagster import _failpoints, retries
from vane_dagster._arguments import PLACEHOLDER
from vane_dagster.errors import DefinitionError, SchemaError, StoreError
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.lance_table import (
    driver_options,
    driver_url,
    lance_type,
    open_table,
    require_lance,
    table_errors,
)
from vane_dagster.storage.manifest import Manifest, PartInfo, Published
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING, Publisher, column_clash
from vane_dagster.storage.publish.compaction import CompactionGroup, staged_rows
from vane_dagster.storage.publish.lance_index import VectorIndex, update_index
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.store import Store
from vane_dagster.storage.table_options import check_table_url
from vane_dagster.types.sql import literal

_WRITERS = 4
_COMMIT_LOCK = (1 << 32) - 1
"""The id of a fragment that no table has. Each commit of ours claims to remove it, so Lance finds
a conflict between any two that overlap, and none is merged into a table that it has not seen."""
_FOLDER = "data/"
_NAME = re.compile(r"([0-9a-f]{16})-(.+)-[0-9a-f]{16}\.lance")
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class _Held:
    """A fragment of the table with rows of the partition.

    Attributes:
        file: Its file, relative to the table.
        stem: The parts that the file was made of, if all of it is as it was published; else "".
        is_shared: Whether rows of other partitions may be in it.
        fragment: The `lance.LanceFragment`.
    """

    file: str
    stem: str
    is_shared: bool
    fragment: Any


class LancePublisher(Publisher):
    """A publisher into a Lance table, as one partition of it or as the whole table."""

    has_folder_per_partition = False
    holds_parquet = False
    options = MappingProxyType({"index": None})

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        self.target = Location(declared.url, declared.storage_options)
        self.staging = self.target.child(STAGING, partition_folder(partition))
        self._column = declared.partition_column
        self._key = None if partition is None else str(partition)
        owner = "" if self._key is None else f"={self._key}"
        self._owner = hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()
        given = declared.options.get("index")
        self._index = None if given is None else VectorIndex(**given)

    @classmethod
    def validate(
        cls, declared: Target, where: str, partitioned: bool, columns: Sequence[str]
    ) -> Target:
        url, column, index = declared.url, declared.partition_column, declared.options["index"]
        require_lance(f"{where}: format='lance'")
        if fields := PLACEHOLDER.findall(url):
            raise DefinitionError(
                f"{where}: {url!r} has {{{fields[0]}}}, but a Lance table holds all partitions; "
                "take it out. The key stands in the column that partition_column names"
            )
        check_table_url(where, url, "Lance")
        if not isinstance(column, str) or not _COLUMN.fullmatch(column):
            raise DefinitionError(
                f"{where}: partition_column is {column!r}; expected letters, digits and '_', with "
                "a letter first"
            )
        if index is not None:
            index = VectorIndex.parse(index, where).declared
        declared = replace(declared, options={"index": index})
        if not partitioned:
            return replace(declared, partition_column=None)
        if clash := column_clash(column, columns):
            raise DefinitionError(f"{where}: {clash}")
        return declared

    @classmethod
    def validate_types(
        cls, declared: Target, where: str, types: Mapping[str, pa.DataType | None], complete: bool
    ) -> None:
        if declared.options["index"] is None:
            return
        index = VectorIndex(**declared.options["index"])
        known = types.get(index.column)
        if (index.column in types and known is None) or (
            index.column not in types and not complete
        ):
            return  # known before the first run computes anything
        if found := index.misfit(known and lance_type(known)):
            raise DefinitionError(f"{where}: {found}")

    @classmethod
    def metadata(cls, published: Published) -> dict[str, Any]:
        return {**super().metadata(published), "table_version": published.version}

    def stored(self, schema: pa.Schema, location: str) -> pa.Schema:
        if clash := column_clash(self._column, schema.names):
            raise SchemaError(f"{location}: {clash}")
        fields = []
        for field in schema:
            kind = lance_type(field.type)
            if kind is None:
                raise SchemaError(
                    f"{location}: column {field.name!r} is {field.type}, which a Lance table "
                    "cannot hold; cast it in a project, for example to BIGINT or VARCHAR"
                )
            fields.append(pa.field(field.name, kind))
        stored = pa.schema(fields)
        if self._index is not None:
            self._index.require(stored, location)
        return stored

    def check(self, schema: pa.Schema, location: str) -> None:
        with table_errors(self.target.url, "read"):
            table = open_table(self.target)
            if table is not None:
                self._fit(table, schema, location)

    def planned(self, manifest: Manifest, sequence: int, former: Published | None) -> Published:
        with table_errors(self.target.url, "read"):
            table = open_table(self.target)
            held = self._held(table)
            taken = {file.path for fragment in _fragments(table) for file in fragment.files}
        if former is not None and table is not None and held.keys() == set(former.files):
            return former
        kept = {each.stem: file for file, each in held.items() if each.stem}
        for attempt in itertools.count():
            # A file that is or was in the table is never written again. Its name is new, unless
            # this same publication was interrupted after its commit.
            seed = f"{manifest.content}-{sequence}-{attempt}"
            unique = hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
            named = {
                stem: f"{_FOLDER}{self._owner}-{stem}-{unique}.lance"
                for stem in self._groups(manifest.parts)
            }
            if not any(name[len(_FOLDER) :] in taken for s, name in named.items() if s not in kept):
                break
        files = [kept.get(stem, name) for stem, name in named.items()]
        return Published(self.target.url, files, "lance")

    def publish(self, manifest: Manifest) -> Published:
        assert manifest.published is not None
        location = f"stage '{manifest.pipeline}/{manifest.stage}'"
        files = manifest.published.files
        made: dict[str, Any] = {}
        for _ in retries.transactions():
            with table_errors(self.target.url, "written"):
                table = open_table(self.target) or self._create(manifest.schema)
                self._fit(table, manifest.schema, location)
                held = self._held(table)
                if held.keys() == set(files):
                    break
                missing = [file for file in files if file not in held and file not in made]
                made |= self._write_files(table, manifest, missing)
                added = [made[file] for file in files if file not in held]
                removed = [each for file, each in held.items() if file not in files]
                committed = self._replace(table, removed, added, manifest)
                if committed is not None:
                    table = committed
                    break
        else:
            raise StoreError(
                f"Lance table {self.target.url!r}: other writers committed "
                f"{retries.TRANSACTION_ATTEMPTS} times while a partition was published. Run it "
                "again when they have ended"
            )
        with table_errors(self.target.url, "indexed"):
            update_index(table, self._index)
        return Published(self.target.url, files, "lance", table.version)

    def holds(self, files: Sequence[str]) -> bool:
        with table_errors(self.target.url, "read"):
            table = open_table(self.target)
            return table is not None and self._held(table).keys() == set(files)

    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        """Do nothing: the commit and Lance's cleanup remove files."""

    def parts(
        self, manifest: Manifest | None, keys: Sequence[str], store: Store
    ) -> Mapping[str, Mapping[str, Location]]:
        """Return the parts whose rows are in the table, one by one unless files hold several."""
        if self._declared.target_bytes is not None:
            return super().parts(manifest, keys, store)
        if manifest is None or manifest.published is None:
            return {}
        with table_errors(self.target.url, "read"):
            held = self._held(open_table(self.target))
        if not held.keys() <= set(manifest.published.files):
            return {}
        stems = {each.stem for each in held.values()}
        there = [part for part in manifest.parts if not part.rows or _stem(part) in stems]
        return {part.key: {part.name: self.target} for part in there}

    def unpublished(self, parts: Sequence[tuple[Location, str]]) -> Published | None:
        """Return a publication without files: checks read the rows of the upstream stage."""
        return Published(self.target.url, [], "lance")

    # The files

    def _groups(self, parts: Sequence[PartInfo]) -> dict[str, CompactionGroup]:
        """Return the parts of each file, by the file's stem."""
        rows = [part for part in parts if part.rows]
        if self._declared.target_bytes is None:
            return {_stem(part): CompactionGroup((part,), 1) for part in rows}
        groups = [replace(group, count=1) for group in self._compaction_groups(rows)]
        return {group.stems[0]: group for group in groups}

    def _write_files(self, table: Any, manifest: Manifest, files: Sequence[str]) -> dict[str, Any]:
        """Write files in the table's folder, where readers do not see them before the commit."""
        groups = self._groups(manifest.parts)
        wanted = {file: groups[_published_stem(file)] for file in files}
        self._require_staged(part for group in wanted.values() for part in group.parts)
        schema = pa.schema([field.remove_metadata() for field in table.schema])

        def write(file: str) -> Any:
            rows = staged_rows(wanted[file], self.staging, manifest.schema)
            return self._write_file(table, schema, file, rows)

        with ThreadPoolExecutor(max_workers=_WRITERS) as threads:
            return dict(zip(wanted, threads.map(write, wanted)))

    def _write_file(
        self, table: Any, schema: pa.Schema, file: str, tables: Iterable[pa.Table]
    ) -> Any:
        from lance.file import LanceFileWriter
        from lance.fragment import DataFile, FragmentMetadata

        _failpoints.at_storage("write", self.target.file_url(file))
        written = 0
        with LanceFileWriter(
            f"{driver_url(self.target)}/{file}",
            schema,
            version=table.data_storage_version,
            storage_options=driver_options(self.target),
        ) as writer:
            for rows in tables:
                if self._column:
                    rows = rows.append_column(self._column, pa.repeat(self._key, len(rows)))
                writer.write_batch(rows.select(schema.names).cast(schema))
                written += len(rows)
        made = DataFile.create(table, file[len(_FOLDER) :])
        return FragmentMetadata(id=0, files=[made], physical_rows=written)

    # The table

    def _create(self, schema: pa.Schema) -> Any:
        import lance

        try:
            return lance.write_dataset(
                self._table_schema(schema).empty_table(),
                driver_url(self.target),
                mode="create",
                storage_options=driver_options(self.target),
            )
        except (OSError, ValueError):  # another run may have created it at the same time
            if (table := open_table(self.target)) is None:
                raise
            return table

    def _table_schema(self, schema: pa.Schema) -> pa.Schema:
        if self._column:
            schema = schema.append(pa.field(self._column, pa.string()))
        return schema

    def _held(self, table: Any) -> dict[str, _Held]:
        """Return the fragments with rows of the partition, by file; a changed one by its id."""
        found: dict[str, _Held] = {}
        for fragment in table.get_fragments() if table is not None else ():
            metadata = fragment.metadata
            file = str(metadata.files[0].path)
            match = _NAME.fullmatch(file)
            if self._column and match is not None and match[1] != self._owner:
                continue
            is_own = match is not None and match[1] == self._owner
            if self._column and not is_own and not fragment.count_rows(self._is_ours):
                continue
            is_whole = is_own and len(metadata.files) == 1 and metadata.deletion_file is None
            stem = match[2] if match is not None and is_whole else ""
            name = f"{_FOLDER}{file}" if is_whole else f"fragment {fragment.fragment_id}"
            found[name] = _Held(file, stem, bool(self._column) and not is_own, fragment)
        return found

    @property
    def _is_ours(self) -> str:
        """The SQL filter for rows of the partition."""
        return f"`{self._column}` = {literal(self._key or '')}"

    def _fit(self, table: Any, schema: pa.Schema, location: str) -> None:
        """Raise SchemaError if the table has other columns."""
        wanted, there = _shape(self._table_schema(schema)), _shape(table.schema)
        for name in dict.fromkeys([*wanted, *there]):
            if wanted.get(name) != there.get(name):
                raise SchemaError(
                    f"{location}: column {name!r} is {wanted.get(name, 'no column')} here, but "
                    f"{there.get(name, 'no column')} in the Lance table {self.target.url!r}. Make "
                    "the rows fit with a project, change the table (alter_columns, add_columns or "
                    "drop_columns of pylance), or publish into another one"
                )

    def _replace(
        self, table: Any, removed: Sequence[_Held], added: Sequence[Any], manifest: Manifest
    ) -> Any:
        """Replace the partition's fragments in one commit."""
        from lance import LanceDataset, LanceOperation, Transaction
        from lance.commit import CommitConflictError

        gone, updated = [_COMMIT_LOCK], []
        for each in removed:
            left = each.fragment.delete(self._is_ours) if each.is_shared else None
            if left is None:
                gone.append(each.fragment.fragment_id)
            else:
                updated.append(left)
        operation = LanceOperation.Update(
            removed_fragment_ids=gone, updated_fragments=updated, new_fragments=list(added)
        )
        properties = {
            "vane_dagster.stage": f"{manifest.pipeline}/{manifest.stage}",
            "vane_dagster.run_id": manifest.run_id,
        }
        if self._key is not None:
            properties["vane_dagster.partition"] = self._key
        transaction = Transaction(table.version, operation, transaction_properties=properties)
        try:
            options = driver_options(self.target)
            return LanceDataset.commit(table, transaction, storage_options=options)
        except CommitConflictError:
            return None


def _stem(part: PartInfo) -> str:
    return part.name[: -len(".parquet")]


def _published_stem(file: str) -> str:
    match = _NAME.fullmatch(file[len(_FOLDER) :])
    assert match is not None, f"{file!r} was planned by this class"
    return match[2]


def _fragments(table: Any) -> Iterator[Any]:
    for fragment in table.get_fragments() if table is not None else ():
        yield fragment.metadata


def _shape(schema: pa.Schema) -> dict[str, str]:
    """Return column names and types of a table, for messages and comparison."""
    return {
        field.name: f"{lance_type(field.type)}{'' if field.nullable else ' not null'}"
        for field in schema
    }
