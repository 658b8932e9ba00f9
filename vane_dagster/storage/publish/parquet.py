"""Publishing: a `write` stage's parts, put where any tool reads them.

Workers write into a folder of the target that readers pass over. A commit announces what it is
about to publish, publishes it, puts the manifest in force, and only then removes what former
manifests named, and what a killed run had announced.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from vane_dagster.errors import StoreError, names
from vane_dagster.pipeline.specs import StageSpec, WriteSpec
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import (
    Manifest,
    ManifestName,
    PartInfo,
    Published,
    parse_part_name,
)
from vane_dagster.storage.paths import published_folder
from vane_dagster.storage.publish.compaction import Bundle, Made, bundles, write_bundles
from vane_dagster.storage.store import Store
from vane_dagster.types.url_pattern import url_for

STAGING = "_vane_staging"
"""The folder of a target in which workers write."""
_MERGED = re.compile(r"[0-9a-f]{32}-\d+-of-\d+\.parquet")
_MOVERS = 8


def publisher_of(spec: StageSpec, partition: str | None) -> Publisher | None:
    """What publishes a partition of a `write` stage; None for other stages."""
    if not spec.publishes:
        return None
    if spec.format == "delta":
        from vane_dagster.storage.publish.delta import DeltaPublisher

        return DeltaPublisher(spec, partition)
    return FolderPublisher(spec, partition)


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
    """Publishes one partition of a `write` stage.

    Attributes:
        target: The folder or table that people read.
        staging: Where workers write the parts; readers of the target pass over it.
    """

    target: Location
    staging: Location

    def __init__(self, spec: WriteSpec) -> None:
        self._spec = spec

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
        assert self._spec.target_bytes is not None
        return bundles(parts, self._spec.target_bytes)

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
            self._spec.compression,
        )  # fmt: skip


class FolderPublisher(Publisher):
    """Publishes into a plain folder of Parquet."""

    def __init__(self, spec: WriteSpec, partition: str | None) -> None:
        super().__init__(spec)
        url = url_for(spec.url, partition, published_folder)
        self.target = Location(url, spec.storage_options)
        self.staging = self.target.child(STAGING)

    def check(self, schema: pa.Schema, culprit: str) -> None:
        self._refuse_table()

    def planned(self, manifest: Manifest, sequence: int, former: Published | None) -> Published:
        self._refuse_table()  # which may have been created since the plan was made
        if self._spec.target_bytes is None:
            return Published(self.target.url, [part.name for part in manifest.parts])
        files = [name for bundle in self._bundles(manifest.parts) for name in _file_names(bundle)]
        return Published(self.target.url, files)

    def publish(self, manifest: Manifest) -> Published:
        assert manifest.published is not None
        if self._spec.target_bytes is None:
            self._promote(manifest.parts)
        else:
            present = self.target.names()
            named = [(bundle, _file_names(bundle)) for bundle in self._bundles(manifest.parts)]
            self._write([n for n in named if any(f not in present for f in n[1])], manifest)
        self.require(manifest.published.files)
        return manifest.published

    def holds(self, files: Sequence[str]) -> bool:
        present = self.target.names()
        return all(name in present for name in files)

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
    ) -> Mapping[str, Mapping[str, Location]]:
        if self._spec.target_bytes is None:
            return store.existing_parts(self.target)
        return super().parts(manifest, keys, store)

    def unpublished(self, parts: Sequence[tuple[Location, str]]) -> Published | None:
        if self._spec.target_bytes is not None:
            return super().unpublished(parts)
        files = [f"{STAGING}/{n}" if place == self.staging else n for place, n in parts]
        return Published(self.target.url, files)

    def clear(self, parts: Sequence[PartInfo]) -> None:
        if self._spec.target_bytes is not None:  # else they were moved
            super().clear(parts)

    def _refuse_table(self) -> None:
        if self.target.fs.exists(self.target.file("_delta_log")):
            raise StoreError(
                f"{self.target.url!r} is a Delta table; publish into it with format='delta', or "
                "into another folder"
            )

    def _promote(self, parts: Sequence[PartInfo]) -> None:
        """Moves staged parts into the target; those already there are left."""
        staged = self.staging.names()
        with ThreadPoolExecutor(max_workers=_MOVERS) as threads:
            moved = [part.name for part in parts if part.name in staged]
            list(threads.map(lambda name: self.staging.move(name, self.target, name), moved))


def _file_names(bundle: Bundle) -> list[str]:
    return [f"{stem}.parquet" for stem in bundle.stems]
