"""What publishes a `write` stage's parts: the base of each format's class, and its use at a commit.

Workers write into a folder of the target that readers pass over. A commit announces what it is
about to publish, publishes it, puts the manifest in force, and only then removes what former
manifests named, and what a killed run had announced.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import PLACEHOLDER
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.filesystem import Location, Stored
from vane_dagster.storage.manifest import Manifest, ManifestName, PartInfo, Published
from vane_dagster.storage.publish.compaction import Bundle, Made, bundles, write_bundles
from vane_dagster.storage.store import Store

STAGING = "_vane_staging"
"""The folder of a target in which workers write."""
PARTITION_COLUMN = "partition_key"
"""The default column of a table with the partition's key."""


@dataclass(frozen=True)
class Target:
    """What a `write` stage publishes into, as it is declared.

    Attributes:
        url: A folder with placeholders for the partition's key, or a table.
        storage_options: Options of the fsspec file system; never part of a key.
        compression: Codec of the Parquet files.
        format: The name of the format, as "parquet"; see `registry`.
        target_bytes: About how large files are made; None for a file a fragment.
        partition_column: The column of a table with the partition's key; None without one.
        options: The arguments that only this format takes; see `Publisher.options`.
    """

    url: str
    storage_options: Mapping[str, Any] = field(repr=False)
    compression: str
    format: str = "parquet"
    target_bytes: int | None = None
    partition_column: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def publish(
    store: Store, publisher: Publisher, manifest: Manifest
) -> tuple[Manifest, ManifestName]:
    """Publishes a partition whose parts are all staged or published, and commits it.

    Returns:
        The manifest, which says what was published where, and its name.

    Raises:
        NewerFormatError: If a newer release has announced a publication of the partition.
        StoreError: If the target refuses, or parts are in neither place.
        SchemaError: If the target has another schema.
    """
    place = (manifest.pipeline, manifest.stage, manifest.partition)
    name = store.latest(*place[:2], [place[2]]).get(place[2])
    if name is None or name.unfinished:
        store.require_announced(*place)
    former = None
    if name is not None and name.content == manifest.content:
        former = store.read(*place, name).published
    sequence = name.sequence if name else 0
    manifest = replace(manifest, published=publisher.planned(manifest, sequence, former))
    store.announce(manifest)
    manifest = replace(manifest, published=publisher.publish(manifest))
    name = store.commit(manifest)
    # Another run may have published the partition meanwhile: the later manifest wins.
    in_force = store.in_force(*place) or manifest
    publisher.retire(store.published_before(*place), in_force.published_files)
    if in_force.content == manifest.content:
        try:
            publisher.require(in_force.published_files)
        except StoreError:
            store.announce(manifest)  # so that the next run publishes what was lost
            raise
    publisher.clear(manifest.parts)
    store.forget_announced(*place)
    return manifest, name


class Publisher(abc.ABC):
    """Publishes one partition of a `write` stage: all that is specific to a format.

    A subclass is constructed as `Publisher(declared, partition)`; its constructor sets `target` and
    `staging`. `registry` maps names of formats to subclasses.

    Attributes:
        has_folder_per_partition: Whether the URL has placeholders for the partition's key. If not,
            one target holds all partitions.
        holds_parquet: Whether published files are Parquet, which readers, checks and traces open.
            If not, checks read the staged parts, and readers get an error.
        options: The arguments of `write` that only this format takes, with their defaults. They
            are part of the stage's definition, so their values are plain.
        target: The folder or table that people read.
        staging: Where workers write the parts: a folder called `STAGING` inside the target, or
            below one. Readers of the target pass over it.
    """

    has_folder_per_partition: ClassVar[bool]
    holds_parquet: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {}
    target: Location
    staging: Location

    def __init__(self, declared: Target, partition: str | None) -> None:
        self._declared = declared

    @classmethod
    @abc.abstractmethod
    def validate(
        cls, declared: Target, where: str, partitioned: bool, columns: Sequence[str]
    ) -> Target:
        """Validates a target when `write` declares it, without any I/O.

        Args:
            declared: The target as the user wrote it. Its URL's placeholders are valid where
                `has_folder_per_partition`.
            where: The stage, for messages.
            partitioned: Whether the pipeline has partitions.
            columns: The rows' columns, as far as the declaration knows them.

        Returns:
            The target to keep, with arguments that do not apply set to None.

        Raises:
            DefinitionError: If an argument does not fit the format, or its library is missing.
        """

    @classmethod
    def staged_parts(cls, url: str, storage_options: Mapping[str, Any]) -> dict[str, Stored]:
        """All files that workers have staged in a stage's targets, by URL, for garbage collection.

        Args:
            url: The target's URL, as `write` was given it.
            storage_options: Options of the fsspec file system.

        Raises:
            StoreError: If it cannot be listed.
        """
        return staged_parts(url, storage_options)

    @classmethod
    def metadata(cls, published: Published) -> dict[str, Any]:
        """The Dagster metadata of a published partition."""
        return {"dagster/uri": published.url}

    @property
    def compression(self) -> str:
        """The codec of staged parts."""
        return self._declared.compression

    @property
    def written(self) -> Sequence[Location]:
        """The folders that a run writes into, which preflight tries."""
        return [self.staging]

    def stored(self, schema: pa.Schema, culprit: str) -> pa.Schema:
        """The schema in which rows are published.

        Raises:
            SchemaError: If the format has no such columns.
        """
        return schema

    @abc.abstractmethod
    def check(self, schema: pa.Schema, culprit: str) -> None:
        """Sees, before anything is computed, whether the target takes rows of a stored schema.

        Raises:
            SchemaError: If it has another one.
            StoreError: If it is no target of this format.
        """

    @abc.abstractmethod
    def planned(self, manifest: Manifest, sequence: int, former: Published | None) -> Published:
        """What is going to be published, to announce it.

        Args:
            manifest: The manifest to be.
            sequence: Sequence number of the manifest in force.
            former: What that one has published, where it is of the same parts.
        """

    @abc.abstractmethod
    def publish(self, manifest: Manifest) -> Published:
        """Puts what a manifest announces into the target.

        Raises:
            StoreError: If the target refuses, or parts are neither staged nor published.
        """

    @abc.abstractmethod
    def holds(self, files: Sequence[str]) -> bool:
        """Whether the target has all of a partition's files."""

    @abc.abstractmethod
    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        """Removes what former manifests published and the one in force did not.

        Args:
            former: Files of former manifests, which are opened one after the other.
            files: Those of the one in force.
        """

    def require(self, files: Sequence[str]) -> None:
        """Sees that all files are published.

        Raises:
            StoreError: If one is not.
        """
        if not self.holds(files):
            raise StoreError(
                f"{self.target.url!r} lost files while they were published: another run published "
                "the same partition at the same time. Run it again"
            )

    def parts(
        self, manifest: Manifest | None, keys: Sequence[str], store: Store
    ) -> Mapping[str, Mapping[str, Location]]:
        """The parts that are published, by fragment key: name and folder of each.

        Where files are not parts, they are there all together or not at all.

        Args:
            manifest: The manifest in force.
            keys: The fragment keys wanted.
            store: The store.
        """
        if manifest is None or manifest.published is None:
            return {}
        if [part.key for part in manifest.parts] != list(keys):
            return {}
        if not self.holds(manifest.published.files):
            return {}
        return {part.key: {part.name: self.target} for part in manifest.parts}

    def unpublished(self, parts: Sequence[tuple[Location, str]]) -> Published | None:
        """Where rows are before they are published: folder and name of each part.

        Returns:
            None where they are in other files than parts, which the manifest in force names.
        """
        if any(folder != self.staging for folder, _ in parts):
            return None
        below = self.staging.url[len(self.target.url) :].lstrip("/")
        return Published(self.target.url, [f"{below}/{name}" for _, name in parts])

    def clear(self, parts: Sequence[PartInfo]) -> None:
        """Removes what is staged of a publication that has ended."""
        staged = self.staging.names()
        self.staging.delete([part.name for part in parts if part.name in staged])

    def _bundles(self, parts: Sequence[PartInfo]) -> list[Bundle]:
        assert self._declared.target_bytes is not None
        return bundles(parts, self._declared.target_bytes)

    def _require_staged(self, parts: Iterable[PartInfo]) -> None:
        staged = self.staging.names()
        if lost := [part.name for part in parts if part.name not in staged]:
            raise StoreError(
                f"{self.target.url!r} lost {names(lost)} while it was published: another run "
                "published the same partition at the same time. Run it again"
            )

    def _write(
        self, wanted: Sequence[tuple[Bundle, Sequence[str]]], manifest: Manifest
    ) -> Mapping[str, Made]:
        self._require_staged(part for bundle, _ in wanted for part in bundle.parts)
        return write_bundles(
            wanted, self.staging, self.target, manifest.schema, manifest.keys[0],
            self._declared.compression,
        )  # fmt: skip


def staged_parts(pattern: str, options: Mapping[str, Any]) -> dict[str, Stored]:
    """All files that workers have staged below a target, by URL.

    Where the pattern has placeholders, everything below its literal beginning is listed.

    Args:
        pattern: The target's URL, as `write` was given it.
        options: Options of the fsspec file system.

    Raises:
        StoreError: If it cannot be listed.
    """
    pattern = pattern.rstrip("/")
    field = PLACEHOLDER.search(pattern)
    if field is None:
        folder = Location(f"{pattern}/{STAGING}", options)
        return {folder.file_url(path): stored for path, stored in folder.entries().items()}
    literal, _, begun = pattern[: field.start()].rpartition("/")
    rest = begun + pattern[field.start() :]
    wanted = "[^/]+".join(map(re.escape, PLACEHOLDER.split(rest)[::2]))
    staged = re.compile(f"{wanted}/{STAGING}/[^/]+")
    folder = Location(literal or "/", options)
    return {
        folder.file_url(path): stored
        for path, stored in folder.entries().items()
        if staged.fullmatch(path)
    }
