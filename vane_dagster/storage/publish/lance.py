"""Lance tables: each publication of a partition is one commit.

A file of the table holds rows of one partition. Its name says which, and which parts it was made
of, so a publication leaves the files of unchanged parts in the table, and a run recognizes its own
commit. Rows that others have written or rewritten, as a compaction does, are found by the column
with the partition's key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster.storage.lance_table import open_table
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.publish.compaction import Parts, staged_rows
from vane_dagster.storage.publish.table import TablePublisher
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.table_options import driver_options, driver_url
from vane_dagster.types.casts import cast_table
from vane_dagster.types.sql import literal

_WRITERS = 4
_COMMIT_LOCK = (1 << 32) - 1
"""The id of a fragment that no table has. Each commit of ours claims to remove it, so Lance finds
a conflict between any two that overlap, and none is merged into a table that it has not seen."""
_FOLDER = "data/"
_NAME = re.compile(r"([0-9a-f]{16})-(.+)-[0-9a-f]{16}\.lance")


@dataclass(frozen=True)
class _Held:
    """A fragment of the table with rows of the partition.

    Attributes:
        is_shared: Whether rows of other partitions may be in it.
        fragment: The `lance.LanceFragment`.
    """

    is_shared: bool
    fragment: Any


class LancePublisher(TablePublisher):
    """A publisher into a Lance table, as one partition of it or as the whole table."""

    format = "lance"
    module = "lance"
    label = "Lance table"
    altered_by = "alter_columns, add_columns or drop_columns of pylance"
    suffix = ".lance"
    keeps_files = True
    keeps_size = True  # as vector search expects

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        self._owner = _owner_of(self._key)

    # The files

    def _prefix(self) -> str:
        return f"{_FOLDER}{self._owner}-"

    @staticmethod
    def _flat_type(kind: pa.DataType) -> pa.DataType | None:
        if pa.types.is_decimal(kind):
            return kind if kind.bit_width >= 128 else pa.decimal128(kind.precision, kind.scale)
        is_unknown = pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind)
        return None if is_unknown or pa.types.is_interval(kind) else kind

    def _place(
        self, table: Any, manifest: Manifest, named: Mapping[str, Parts]
    ) -> Mapping[str, Any]:
        self._require_staged(part for group in named.values() for part in group)
        schema = pa.schema([field.remove_metadata() for field in table.schema])

        def write(path: str) -> Any:
            rows = staged_rows(named[path], self.staging, manifest.schema)
            return self._write_file(table, schema, path, rows)

        with ThreadPoolExecutor(max_workers=_WRITERS) as threads:
            return dict(zip(named, threads.map(write, named)))

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
                writer.write_batch(cast_table(rows, schema))
                written += len(rows)
        made = DataFile.create(table, file[len(_FOLDER) :])
        return FragmentMetadata(id=0, files=[made], physical_rows=written)

    # The table

    def _opened(self) -> Any:
        return open_table(self.target)

    def _create(self, schema: pa.Schema) -> None:
        import lance

        lance.write_dataset(
            schema.empty_table(),
            driver_url(self.target),
            mode="create",
            storage_options=driver_options(self.target),
        )

    def _active(self, table: Any) -> dict[str, Any]:
        """Return the fragments with rows of the partition, by file; a changed one by its id.

        A fragment is unchanged if its only file is one of ours and no row of it was deleted.
        """
        active: dict[str, _Held] = {}
        for fragment in table.get_fragments():
            metadata = fragment.metadata
            file = str(metadata.files[0].path)
            match = _NAME.fullmatch(file)
            is_own = match is not None and match[1] == self._owner
            if self._column and not is_own and (match or not fragment.count_rows(self._is_ours)):
                continue
            is_whole = is_own and len(metadata.files) == 1 and metadata.deletion_file is None
            name = f"{_FOLDER}{file}" if is_whole else f"fragment {fragment.fragment_id}"
            active[name] = _Held(bool(self._column) and not is_own, fragment)
        return active

    def _keys(self, table: Any, wanted: Sequence[str]) -> Iterable[str]:
        fragments = [
            (f, _NAME.fullmatch(str(f.metadata.files[0].path))) for f in table.get_fragments()
        ]
        owners = {match[1] for _, match in fragments if match}
        held = {key for key in wanted if _owner_of(key) in owners}
        others = [fragment for fragment, match in fragments if not match]
        if others and len(held) < len(wanted):
            for batch in table.scanner(columns=[self._column], fragments=others).to_batches():
                held.update(batch.column(0).unique().to_pylist())
        return held

    @property
    def _is_ours(self) -> str:
        """The SQL filter for rows of the partition."""
        return f"`{self._column}` = {literal(self._key or '')}"

    def _columns(self, table: Any) -> pa.Schema:
        return table.schema

    def _replace(
        self, table: Any, gone: Mapping[str, Any], added: Mapping[str, Any], manifest: Manifest
    ) -> Any:
        from lance import LanceDataset, LanceOperation, Transaction
        from lance.commit import CommitConflictError

        removed, updated = [_COMMIT_LOCK], []
        for each in gone.values():
            left = each.fragment.delete(self._is_ours) if each.is_shared else None
            if left is None:
                removed.append(each.fragment.fragment_id)
            else:
                updated.append(left)
        operation = LanceOperation.Update(
            removed_fragment_ids=removed, updated_fragments=updated, new_fragments=[*added.values()]
        )
        properties = self._properties(manifest)
        transaction = Transaction(table.version, operation, transaction_properties=properties)
        try:
            options = driver_options(self.target)
            return LanceDataset.commit(table, transaction, storage_options=options)
        except CommitConflictError:
            return None

    def _version(self, table: Any) -> int | None:
        return int(table.version)


def _owner_of(key: str | None) -> str:
    """Return how names of files say which partition their rows are of."""
    owner = "" if key is None else f"={key}"
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()
