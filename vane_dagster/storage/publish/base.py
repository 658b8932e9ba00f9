"""Publishers of `write` stages: the base class of all formats, and its use at a commit.

Workers write into a folder of the target, under names that patterns of readers, such as
``**/*.parquet``, do not match. A commit announces the publication,
publishes it, and puts the manifest in force. Only then it removes files of earlier manifests, and
files that a killed run had announced.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import PLACEHOLDER
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.filesystem import FileInfo, StoragePath
from vane_dagster.storage.manifest import Manifest, ManifestName, PartInfo, Published
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.compaction import Parts, PlacedFile, write_compacted
from vane_dagster.storage.publish.target import Target
from vane_dagster.storage.store import ANNOUNCED, Store, latest_name

STAGING = "_vane_staging"
"""The folder of a target that workers write into."""
STAGED = ".staged"
"""The end of the names of its files, so that no reader takes them for Parquet files."""


_LOST = (
    "Another run may have published the partition at the same time. If not, check that all workers "
    "and this machine share the folder, and that nothing else changes it. Then run it again"
)
"""What to do if files are neither staged nor published."""


def publish(
    store: Store,
    publisher: Publisher,
    manifest: Manifest,
    began: float,
    names: Sequence[str],
    transaction: AbstractContextManager[Any],
) -> tuple[Manifest, ManifestName]:
    """Publish a partition with all parts staged or published, and commit it.

    Announcements before `began`, the time at which the run began, are of runs that were killed.
    They are among `names`: those of the partition's manifests, listed since then. Other threads
    that publish into the same table have the same `transaction`, a lock.
    """
    place, url = (manifest.pipeline, manifest.stage, manifest.partition), publisher.target.url
    manifest = replace(manifest, published=Published(url, publisher.planned(manifest)))
    announced = [store.announce(manifest), *store.announced(manifest, began, names)]
    known = {announced[0]: manifest}
    with transaction:
        manifest = replace(manifest, published=publisher.publish(manifest))
    now = store.manifest_names(*place)
    if any(not each.startswith(ANNOUNCED) for each in {*now} - {*names}):
        # Another run has committed since, and may have removed files of this one.
        _require(store, publisher, manifest, manifest.published_files)
    name = store.commit(manifest, now)
    known[str(name)] = manifest
    # Another run may have published the partition at the same time: the later manifest wins.
    names = store.manifest_names(*place)
    latest = str(latest_name(names) or name)
    in_force = known.get(latest) or store.opened(*place[:2], partition_folder(place[2]), latest)
    former = [each for each in names if each in announced or not each.startswith(ANNOUNCED)]
    if not known.keys() >= {*former}:
        publisher.retire(store.published_before(*place, former, known), in_force.published_files)
    if in_force.content == manifest.content:
        _require(store, publisher, manifest, in_force.published_files)
    publisher.clear(manifest.parts)
    store.forget_announced(*place, announced)
    return manifest, name


def _require(store: Store, publisher: Publisher, manifest: Manifest, files: Sequence[str]) -> None:
    """Check that all files of a manifest are published; announce it again if not."""
    try:
        publisher.require(files)
    except StoreError:
        store.announce(manifest)  # makes the next run publish the lost files, or remove the others
        raise


class Publisher(abc.ABC):
    """The publisher of one partition of a `write` stage: everything specific to a format.

    A subclass is constructed as `Publisher(declared, partition)`; its constructor sets `target`.
    `registry` maps names of formats to subclasses.

    Attributes:
        has_folder_per_partition: Whether the URL has placeholders for the partition's key. If not,
            one target holds all partitions.
        options: The arguments of `write` that only this format takes, with their defaults. They are
            part of the stage's definition, so `validate` makes their values plain.
        target: The folder or table that people read.
    """

    has_folder_per_partition: ClassVar[bool]
    options: ClassVar[Mapping[str, Any]] = {}
    target: StoragePath

    def __init__(self, declared: Target, partition: str | None) -> None:
        self._declared, self._partition = declared, partition

    @property
    def staging(self) -> StoragePath:
        """The folder of the target that workers write the partition's parts into."""
        below = () if self.has_folder_per_partition else (partition_folder(self._partition),)
        return replace(self.target.child(STAGING, *below), suffix=STAGED)

    @classmethod
    @abc.abstractmethod
    def validate(cls, declared: Target, where: str, partitioned: bool) -> Target:
        """Validate a target when `write` declares it, without any I/O."""

    @property
    def compression(self) -> str:
        """The codec of staged parts."""
        return self._declared.compression

    def stored(self, schema: pa.Schema, location: str) -> pa.Schema:
        """Return the schema in which rows are published."""
        return schema

    @abc.abstractmethod
    def check(self, schema: pa.Schema, location: str) -> None:
        """Check, before anything is computed, that the target accepts rows of a stored schema."""

    def planned(self, manifest: Manifest) -> Sequence[str]:
        """Return the files that readers see before the commit, to announce them."""
        return ()

    @abc.abstractmethod
    def publish(self, manifest: Manifest) -> Published:
        """Publish a manifest into the target."""

    @abc.abstractmethod
    def holds(self, files: Sequence[str]) -> bool:
        """Return whether the target has all of a partition's files."""

    @abc.abstractmethod
    def present(self, partitions: Sequence[str | None]) -> Iterable[str | None]:
        """Return the partitions that have rows in the target, with as few reads as possible.

        All partitions are of the same `write` stage. Who wrote the rows does not matter, because
        the maintenance of a table replaces its files.
        """

    @abc.abstractmethod
    def retire(self, former: Iterable[Sequence[str]], files: Sequence[str]) -> None:
        """Remove published files of earlier manifests that are not in the one in force."""

    def require(self, files: Sequence[str]) -> None:
        """Check that all files are published."""
        if not self.holds(files):
            raise StoreError(
                f"{self.target.url!r} does not have the files published there. {_LOST}"
            )

    def parts(
        self, manifest: Manifest | None, keys: Sequence[str], store: Store
    ) -> Mapping[str, Mapping[str, StoragePath]]:
        """Return the parts that are published, by fragment key: name and folder of each.

        If the files are not parts, either all parts are published or none.
        """
        if manifest is None or manifest.published is None:
            return {}
        if [part.key for part in manifest.parts] != list(keys):
            return {}
        if not self.holds(manifest.published.files):
            return {}
        return {part.key: {part.name: self.target} for part in manifest.parts}

    def clear(self, parts: Sequence[PartInfo]) -> None:
        """Remove the staged parts of a publication that has ended."""
        staged = self.staging.names()
        self.staging.delete([part.name for part in parts if part.name in staged])

    def _require_staged(self, parts: Iterable[PartInfo]) -> None:
        staged = self.staging.names()
        if lost := [part.name for part in parts if part.name not in staged]:
            raise StoreError(
                f"{self.staging.url!r} does not have {names(lost)}, which workers wrote there. "
                + _LOST
            )

    def _write(self, wanted: Mapping[str, Parts], manifest: Manifest) -> Mapping[str, PlacedFile]:
        self._require_staged(part for parts in wanted.values() for part in parts)
        return write_compacted(
            wanted, self.staging, self.target, manifest.schema, self._declared.compression
        )


def staged_parts(pattern: str, options: Mapping[str, Any]) -> dict[str, FileInfo]:
    """List all files that workers have staged below a target, by URL.

    If the pattern has placeholders, everything below its literal prefix is listed.
    """
    pattern = pattern.rstrip("/")
    field = PLACEHOLDER.search(pattern)
    if field is None:
        folder, staged = StoragePath(f"{pattern}/{STAGING}", options), ".*"
    else:
        literal, _, begun = pattern[: field.start()].rpartition("/")
        rest = begun + pattern[field.start() :]
        wanted = "[^/]+".join(map(re.escape, PLACEHOLDER.split(rest)[::2]))
        folder, staged = StoragePath(literal or "/", options), f"{wanted}/{STAGING}/[^/]+"
    entries = folder.entries().items()
    return {folder.file_url(path): stored for path, stored in entries if re.fullmatch(staged, path)}
