"""`StoredSource`: rows of another asset in the pipeline's own store.

The driver alone imports this module, and so the store. Workers get a `StoredParquet`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError, SourceError, described, names
from vane_dagster.sources.base import FragmentRule, Listed, Source, SourceTable
from vane_dagster.sources.file_source import asset_path
from vane_dagster.sources.in_store import InStore
from vane_dagster.sources.parquet import ParquetFiles, StoredParquet
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import FileRecord, Manifest
from vane_dagster.storage.reader import find, with_rows
from vane_dagster.storage.store import Store


@dataclass(frozen=True)
class StoredSource(ParquetFiles, InStore):
    """Rows in the pipeline's own store: those of another pipeline's stage, or of an ordinary asset.

    Attributes:
        asset: Key of the Dagster asset, such as "a/b".
        allow_empty: Whether a partition without rows is accepted.
    """

    asset: str
    allow_empty: bool = False

    def url_for(self, partition_key: str | None) -> str:
        """Return the name of the asset, for messages."""
        return f"asset {self.asset}"

    def options_for(self, url: str) -> Mapping[str, Any]:
        return self.for_workers().options_for(url)

    def for_workers(self) -> StoredParquet:
        return StoredParquet(*(each.root for each in self.bound.layers))

    def list_files(
        self, partitions: Sequence[str | None], location: str
    ) -> Mapping[str | None, Listed]:
        """List the files of the manifests in force."""
        store, is_whole = self.bound, list(partitions) == [None]
        path = self.asset.split("/")
        in_force = find(store, path, None if is_whole else partitions)
        others = {} if in_force or is_whole else find(store, path, None)
        has = "it as a whole" if None in others else f"partitions {names(sorted(map(str, others)))}"
        hint = f". It has {has}, but a partition reads the one with the same key" if others else ""

        groups: dict[str | None, list[Manifest]]
        groups = (
            {None: [*in_force.values()]} if is_whole else {key: [m] for key, m in in_force.items()}
        )

        def listed(partition: str | None) -> Listed:
            manifests = groups.get(partition)
            if not manifests:
                return SourceError(
                    f"{location}: asset {self.asset!r} was never materialized into "
                    f"{store.root.url!r}{_where(partition)}; materialize it first, with this store "
                    f"as its IO manager{hint}"
                )
            try:
                return tuple(file for m in manifests for file in _files(store, m))
            except Exception as error:  # drivers raise their own exception classes
                return SourceError(
                    f"{location}: the files of asset {self.asset!r}{_where(partition)} cannot be "
                    f"listed: {described(error)}. Materialize it again"
                )

        return dict(zip(partitions, in_threads(listed, partitions)))

    def missing(self, partition: str | None, location: str) -> SourceError | None:
        """Return None: a partition that was materialized without rows has no files."""
        return None

    def split(
        self,
        files: Sequence[FileRecord],
        rule: FragmentRule,
        location: str,
        partition: str | None = None,
    ) -> SourceTable:
        if files:
            return super().split(files, rule, location, partition)
        keys = None if partition is None else [partition]
        manifests = find(self.bound, self.asset.split("/"), keys)
        if not manifests:
            raise SourceError(f"asset {self.asset!r}{_where(partition)} is gone from the store")
        return SourceTable(
            plain_schema(with_rows(self.bound, next(iter(manifests.values()))).schema), ()
        )


@known_keywords("vd.stored")
def stored(asset: Any, *, allow_empty: bool = False) -> StoredSource:
    """Declare the stored rows of another asset as a pipeline's source.

    A partition of the pipeline reads the partition of that key; an unpartitioned pipeline reads all
    partitions that were materialized.

    Args:
        asset: A stage of another pipeline, an ordinary asset that uses the `FragmentStore` as its
            IO manager, or the key of either, such as "a/b" or ["a", "b"].
        allow_empty: Whether a partition without any rows is accepted; an error by default.

    Raises:
        DefinitionError: If it is not one asset.
    """
    return StoredSource(asset_path(asset, "vd.stored") or "", allow_empty)


def as_source(location: str, source: Any) -> Source:
    """Convert an asset to a `Source`."""
    if isinstance(source, str) or not (hasattr(source, "path") or hasattr(type(source), "key")):
        raise DefinitionError(
            f"{location}: source is a {type(source).__name__}; expected vd.parquet(url), a stage "
            "of another pipeline, an asset, or vd.stored(asset key)"
        )
    return stored(source)


def _files(store: Store, manifest: Manifest) -> Sequence[FileRecord]:
    manifest = with_rows(store, manifest)
    folder = store.parts_of(manifest)
    return [
        FileRecord(
            folder.fs.unstrip_protocol(folder.file(part.name)), part.bytes, part.digest, part.digest
        )
        for part in manifest.parts
        if part.rows
    ]


def _where(partition: str | None) -> str:
    return "" if partition is None else f" in partition {partition!r}"
