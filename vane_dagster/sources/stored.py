"""`StoredSource`: rows of another asset in the pipeline's own store.

The driver alone imports this module, and so the store. Workers get a `StoredParquet`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import dagster as dg


ASSET, MAPPED_BY = "asset", ", partitions by "
"""How the description of a source in the store names the asset, and a mapping of partitions."""


@dataclass(frozen=True)
class StoredSource(ParquetFiles, InStore):
    """Rows in the pipeline's own store: those of another pipeline's stage, or of an ordinary asset.

    Attributes:
        asset: Key of the Dagster asset, such as "a/b".
        allow_empty: Whether a partition without rows is accepted.
        partitions_def: The asset's partitions, if they are known.
        partition_mapping: What a partition of the pipeline reads, if not the one with its key.
        read_by: The partitions of the pipeline.
    """

    asset: str
    allow_empty: bool = False
    partitions_def: Any = field(default=None, repr=False, compare=False)
    partition_mapping: Any = field(default=None, repr=False, compare=False)
    read_by: Any = field(default=None, repr=False, compare=False)

    def of_pipeline(self, name: str, partitions_def: dg.PartitionsDefinition[Any] | None) -> Source:
        """Return the source with the mapping from the pipeline's partitions to the asset's."""
        import dagster as dg

        own, other, mapping = partitions_def, self.partitions_def, self.partition_mapping
        windows = dg.TimeWindowPartitionsDefinition
        if own != other and isinstance(own, windows) and isinstance(other, windows):
            mapping = mapping or dg.TimeWindowPartitionMapping()  # as Dagster maps them
        if mapping is not None:
            where = f"pipeline {name!r}: source {self.place}"
            if own is None or other is None:
                raise DefinitionError(
                    f"{where}: expected partitions_def of the pipeline and of the source for a "
                    f"partition_mapping, got {own} and {other}; pass it to both"
                )
            try:
                mapping.validate_partition_mapping(other, own)
            except dg.DagsterInvalidDefinitionError as error:
                raise DefinitionError(f"{where}: {error}") from error
        return replace(self, pipeline=name, partition_mapping=mapping, read_by=own)

    def _keys(self, partition: str | None) -> Sequence[str | None]:
        """Return the partitions of the asset that a partition of the pipeline reads."""
        if self.partition_mapping is None or partition is None:
            return [partition]
        mapped = self.partition_mapping.get_upstream_mapped_partitions_result_for_partitions(
            self.read_by.subset_with_partition_keys([partition]), self.read_by, self.partitions_def
        )
        subsets = mapped.partitions_subset, mapped.required_but_nonexistent_subset
        return [key for subset in subsets for key in subset.get_partition_keys()]

    def _lacks(self, key: str | None) -> bool:
        import dagster as dg

        known = self.partitions_def
        has_windows = isinstance(known, dg.TimeWindowPartitionsDefinition)
        return key is not None and has_windows and not known.has_partition_key(key)

    def url_for(self, partition_key: str | None) -> str:
        """Return the name of the asset, for messages."""
        return f"{ASSET} {self.asset}"

    def describe(self) -> str:
        """Return a description, in which a trace finds the asset."""
        mapping = self.partition_mapping
        return super().describe() + (f"{MAPPED_BY}{type(mapping).__name__}" if mapping else "")

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
        reads = {partition: self._keys(partition) for partition in partitions}
        wanted = None if is_whole else [key for keys in reads.values() for key in keys]
        in_force = find(store, path, wanted)
        others = {} if in_force or is_whole else find(store, path, None)
        has = "it as a whole" if None in others else f"partitions {names(sorted(map(str, others)))}"
        one = "the one with the same key, unless vd.stored has a partition_mapping"
        hint = f". It has {has}, but a partition reads {one}" if others else ""

        def listed(partition: str | None) -> Listed:
            keys = ([*in_force] or [None]) if is_whole else reads[partition]
            if missing := [key for key in keys if key not in in_force]:
                if self._lacks(missing[0]):
                    return SourceError(
                        f"{location}: asset {self.asset!r} has no partition {missing[0]!r}, which "
                        f"partition {partition!r} reads. To leave it out, pass partition_mapping="
                        "dg.TimeWindowPartitionMapping(allow_nonexistent_upstream_partitions=True)"
                    )
                return SourceError(
                    f"{location}: asset {self.asset!r} was never materialized into "
                    f"{store.root.url!r}{_where(missing[0])}; materialize it first. An asset that "
                    f"is not a stage needs this store as its IO manager{hint}"
                )
            try:
                return tuple(file for key in keys for file in _files(store, in_force[key]))
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
        keys = None if partition is None else self._keys(partition)
        manifests = find(self.bound, self.asset.split("/"), keys)
        if not manifests:
            raise SourceError(f"asset {self.asset!r}{_where(partition)} is gone from the store")
        return SourceTable(
            plain_schema(with_rows(self.bound, next(iter(manifests.values()))).schema), ()
        )


@known_keywords("vd.stored")
def stored(
    asset: Any,
    *,
    allow_empty: bool = False,
    partitions_def: dg.PartitionsDefinition[Any] | None = None,
    partition_mapping: dg.PartitionMapping | None = None,
) -> StoredSource:
    """Declare the stored rows of another asset as a pipeline's source.

    A partition of the pipeline reads the partition of that key or, if both have time windows, those
    that overlap with it: a week reads seven days. An unpartitioned pipeline reads all partitions
    that were materialized.

    Args:
        asset: A stage of another pipeline, an ordinary asset that uses the `FragmentStore` as its
            IO manager, or the key of either, such as "a/b" or ["a", "b"].
        allow_empty: Whether a partition without any rows is accepted; an error by default.
        partitions_def: The partitions of an asset that is given by its key.
        partition_mapping: Which partitions of the asset a partition of the pipeline reads, as
            in ``dg.AssetDep``. All of them must be materialized, and their ids unique together.

    Raises:
        DefinitionError: If it is not one asset.
    """
    owner = getattr(asset, "pipeline", asset)  # of a stage
    known = partitions_def or getattr(owner, "partitions_def", None)
    path = asset_path(asset, "vd.stored") or ""
    return StoredSource(path, allow_empty, known, partition_mapping)


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
