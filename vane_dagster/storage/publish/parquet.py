"""Publishing into plain folders of Parquet files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from vane_dagster._arguments import fill_placeholders
from vane_dagster.errors import DefinitionError, StoreError
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo, Published, parse_part_name
from vane_dagster.storage.paths import published_folder
from vane_dagster.storage.publish.base import Publisher
from vane_dagster.storage.publish.compaction import Parts, plan_compaction
from vane_dagster.storage.publish.target import PARTITION_COLUMN, Target
from vane_dagster.storage.store import Store

_DELTA_LOG = "_delta_log"
_MERGED = re.compile(r"[0-9a-f]{32}-\d+-of-\d+\.parquet")


class FolderPublisher(Publisher):
    """A publisher into a plain folder of Parquet files."""

    has_folder_per_partition = True

    def __init__(self, declared: Target, partition: str | None) -> None:
        super().__init__(declared, partition)
        url = fill_placeholders(declared.url, partition, escape=published_folder)
        self.target = StoragePath(url, declared.storage_options)

    @classmethod
    def validate(cls, declared: Target, where: str, partitioned: bool) -> Target:
        if declared.partition_column != PARTITION_COLUMN:
            raise DefinitionError(
                f"{where}: partition_column={declared.partition_column!r} is for a table, as in "
                "format='delta'; a plain folder has {partition_key} in its URL and no column for it"
            )
        return replace(declared, partition_column=None)

    def check(self, schema: pa.Schema, location: str) -> None:
        if self.target.fs.exists(self.target.file(_DELTA_LOG)):
            self._refuse_table()

    def planned(self, manifest: Manifest) -> Sequence[str]:
        return [*self._files(manifest.parts)]

    def publish(self, manifest: Manifest) -> Published:
        assert manifest.published is not None
        present, folders = self.target.listing()
        if _DELTA_LOG in folders:  # the table was created since the plan was made
            self._refuse_table()
        if self._declared.target_bytes is None:
            staged = self.staging.names()
            moved = [part.name for part in manifest.parts if part.name in staged]
            in_threads(lambda name: self.staging.move(name, self.target, name), moved)
        else:
            files = self._files(manifest.parts)
            moved = [name for name in files if name not in present]
            self._write({name: files[name] for name in moved}, manifest)
        if not {*manifest.published.files} <= {*present, *moved}:
            self.require(manifest.published.files)
        return manifest.published

    def holds(self, files: Sequence[str]) -> bool:
        return set(files) <= self.target.names().keys()

    def present(self, partitions: Sequence[str | None]) -> Iterable[str | None]:
        folders = [type(self)(self._declared, key).target for key in partitions]
        listed = zip(partitions, in_threads(StoragePath.names, folders))
        return [key for key, names in listed if any(name.endswith(".parquet") for name in names)]

    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        left = {n for n in self.target.names() if parse_part_name(n) or _MERGED.fullmatch(n)}
        left -= set(files)
        for named in former if left else ():
            self.target.delete(sorted(left.intersection(named)))
            left.difference_update(named)
            if not left:
                break

    def parts(
        self, manifest: Manifest | None, keys: Sequence[str], store: Store
    ) -> Mapping[str, Mapping[str, StoragePath]]:
        if self._declared.target_bytes is None:
            return store.existing_parts(self.target)
        return super().parts(manifest, keys, store)

    def clear(self, parts: Sequence[PartInfo]) -> None:
        if self._declared.target_bytes is not None:  # else they were moved
            super().clear(parts)

    def _files(self, parts: Sequence[PartInfo]) -> dict[str, Parts]:
        """Return the parts that each file is made of."""
        named = plan_compaction(parts, self._declared.target_bytes)
        return {f"{stem}.parquet": group for stem, group in named.items()}

    def _refuse_table(self) -> None:
        raise StoreError(
            f"{self.target.url!r} is a Delta table; publish into it with format='delta', or into "
            "another folder"
        )
