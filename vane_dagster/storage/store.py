"""The store: parts and manifests of every pipeline, below one root."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from vane_dagster._arguments import NAME
from vane_dagster._home import STORE_MARK
from vane_dagster._texts import in_partition
from vane_dagster.errors import StoreError
from vane_dagster.storage.codec import FORMAT, read_file
from vane_dagster.storage.damage import read_whole
from vane_dagster.storage.filesystem import StoragePath, absolute_url
from vane_dagster.storage.manifest import (
    MANIFEST,
    Manifest,
    ManifestName,
    PartInfo,
    generation_number,
    parse_part_name,
    read_part_footer,
)
from vane_dagster.storage.paths import partition_folder

_K = TypeVar("_K")
_T = TypeVar("_T")
_LISTED_ONE_BY_ONE = 8
ANNOUNCED = "publishing-"
"""The name prefix of manifests with an unfinished publication."""
PUBLISHED = "~published"
"""The folder below a branch's root that its `write` stages publish into."""
TARGET = "target.json"
"""The file with the target of a `write` stage."""
_SOURCE = "source.json"
_FRAGMENTS = "fragments.json"
BRANCH = "branch.json"
"""The file of a branch that names its fallback, from its first run on."""
CONDEMNED = "condemned.json"
"""The file with the parts of a stage that no plan may build on; see `storage.gc`."""


class Store:
    """Parts and manifests below a root, on local disk or any fsspec file system.

    ``<root>/<pipeline>/<stage>/parts/<partition>/<fragment key>-<digest>.parquet`` and
    ``<root>/<pipeline>/<stage>/manifests/<partition>/<sequence>-g<generation>-<plan>-<content>.json``.

    A store with a fallback is a branch: a partition of a stage that it has committed is its own,
    and every other one is read from the fallback. A manifest and its parts are below one root, so a
    commit copies parts of the fallback that its manifest names. Nothing is written to the fallback.

    Attributes:
        root: The folder or bucket.
        keeps_code: Whether texts of definitions are stored.
        fallback: The store that a branch reads what it lacks from.
        targets: Where a branch publishes `write` stages, by "pipeline/stage"; others are published
            below its root.
    """

    def __init__(
        self,
        root: StoragePath,
        keeps_code: bool = True,
        fallback: Store | None = None,
        targets: Mapping[str, str] | None = None,
    ) -> None:
        self.root = root
        self.keeps_code = keeps_code
        self.fallback = fallback
        self.targets = targets or {}

    def mark(self) -> None:
        """Mark a branch, and a local root: its content does not count where code names it."""
        if self.fallback is not None and self.branch_of is None:
            record = json.dumps({"fallback": self.fallback.root.url})
            self.root.create(BRANCH, record.encode())
        if self.root.is_local and not os.path.exists(self.root.file(STORE_MARK)):
            self.root.create(STORE_MARK, b"")

    @property
    def layers(self) -> tuple[Store, ...]:
        """The store, and the one that it reads what it lacks from."""
        return (self,) if self.fallback is None else (self, *self.fallback.layers)

    @property
    def branch_of(self) -> str | None:
        """The root of the fallback of its first run; None if it is not a branch."""
        return read_file(self.root, BRANCH, lambda record: str(record["fallback"]))

    @property
    def described(self) -> str:
        """Its root for messages, which say so if it is a branch that was opened by its root."""
        other = self.branch_of if self.fallback is None else None
        text = f" (a branch, opened without its fallback {other!r})"
        return f"{self.root.url!r}{text if other else ''}"

    def parts(self, pipeline: str, stage: str, partition: str | None) -> StoragePath:
        """Return the folder that a stage's parts in a partition are written to."""
        return self.root.child(pipeline, stage, "parts", partition_folder(partition))

    def parts_of(self, manifest: Manifest) -> StoragePath:
        """Return the folder with the parts of a manifest, which is not one of a `write` stage."""
        place = manifest.pipeline, manifest.stage, "parts", partition_folder(manifest.partition)
        return (manifest.root or self.root).child(*place)

    def manifests(self, pipeline: str, stage: str, partition: str | None) -> StoragePath:
        """Return the folder that a stage's manifests in a partition are written to."""
        return self.root.child(pipeline, stage, "manifests", partition_folder(partition))

    def stages(self, pipeline: str) -> list[str]:
        """Return the folders of a pipeline's stages, sorted, without those of previews' input."""
        folders = {s for each in self.layers for s in each.root.child(pipeline).folders()}
        return sorted(filter(NAME.fullmatch, folders))

    def latest(
        self, pipeline: str, stage: str, partitions: Iterable[str | None]
    ) -> dict[str | None, ManifestName]:
        """The names of the manifests in force of a stage, by partition, from listings alone."""
        wanted = {partition_folder(key): key for key in partitions}
        if len(wanted) > _LISTED_ONE_BY_ONE:
            listed = self.latest_of_all(pipeline, stage)
            return {wanted[folder]: name for folder, name in listed.items() if folder in wanted}
        keys = wanted.values()
        names = {key: name for key in keys if (name := self.latest_own(pipeline, stage, key))}
        if self.fallback is not None:
            lacking = [key for key in keys if key not in names]
            names |= _finished(self.fallback.latest(pipeline, stage, lacking))
        return names

    def latest_own(self, pipeline: str, stage: str, partition: str | None) -> ManifestName | None:
        """Return the name of the manifest in force below this root alone."""
        return latest_name(self.manifests(pipeline, stage, partition).names())

    def latest_of_all(self, pipeline: str, stage: str) -> dict[str, ManifestName]:
        """Return the manifests in force of a stage, by partition folder, from one listing."""
        listed: dict[str, list[str]] = {}
        for path in self.root.child(pipeline, stage, "manifests").walk():
            folder, _, name = path.rpartition("/")
            listed.setdefault(folder, []).append(name)
        own = {folder: newest for folder in listed if (newest := latest_name(listed[folder]))}
        if self.fallback is None:
            return own
        return _finished(self.fallback.latest_of_all(pipeline, stage)) | own

    def history(self, pipeline: str, stage: str) -> list[tuple[str, ManifestName]]:
        """Return the folder and name of every manifest of a stage, in the order of commits.

        Those of the fallback precede the store's own.
        """
        parsed = {
            (path.rpartition("/")[0], name): None
            for each in reversed(self.layers)
            for path in sorted(each.root.child(pipeline, stage, "manifests").walk())
            if (name := ManifestName.parse(path.rpartition("/")[2])) is not None
        }
        return list(parsed)

    def read(
        self, pipeline: str, stage: str, partition: str | None, name: ManifestName
    ) -> Manifest:
        """Open a manifest."""
        return self.opened(pipeline, stage, partition_folder(partition), str(name))

    def opened(self, pipeline: str, stage: str, folder: str, name: str) -> Manifest:
        """Open a manifest by the folder of its partition and its file name."""
        manifest = self.opened_if_there(pipeline, stage, folder, name)
        if manifest is None:
            manifests = self.root.child(pipeline, stage, "manifests", folder)
            raise StoreError(
                f"manifest {manifests.file_url(name)!r} is missing. Materialize the stage again"
            )
        return manifest

    def opened_if_there(self, pipeline: str, stage: str, folder: str, name: str) -> Manifest | None:
        """Open a manifest; None if it is gone, because another run has removed it."""
        fix = "Delete it and materialize the stage again"
        for each in self.layers:
            manifests = each.root.child(pipeline, stage, "manifests", folder)
            if (manifest := read_file(manifests, name, MANIFEST.load, fix)) is not None:
                return replace(manifest, root=each.root)
        return None

    def in_force(self, pipeline: str, stage: str, partition: str | None) -> Manifest | None:
        """Open the manifest in force of a partition; None if it was never materialized."""
        name = self.latest(pipeline, stage, [partition]).get(partition)
        return None if name is None else self.read(pipeline, stage, partition, name)

    def commit_once(
        self, manifest: Manifest, former: ManifestName | None
    ) -> tuple[Manifest, ManifestName]:
        """Put a manifest in force, unless another run has since committed the same content."""
        names = self.manifest_names(manifest.pipeline, manifest.stage, manifest.partition)
        other = self.committed_since(manifest, former, names)
        return other or (manifest, self.commit(manifest, names))

    def committed_since(
        self, manifest: Manifest, former: ManifestName | None, names: Sequence[str]
    ) -> tuple[Manifest, ManifestName] | None:
        """Return the manifest in force if it is whole, not `former`, and has the same content.

        Of the manifests with some names.
        """
        name = latest_name(names)
        number = generation_number(manifest.generation)
        if name is not None and generation_number(name.generation) > number:
            place = f"{manifest.pipeline}/{manifest.stage}{in_partition(manifest.partition)}"
            raise StoreError(
                f"{place}: a run that began later has computed "
                "it again (force, retry_quarantined or reuse='none'), and its results stay. Run "
                "again for what has changed since"
            )
        if name is None or name == former or name.unfinished:
            return None
        if name.version != (manifest.generation, manifest.plan, manifest.content):
            return None
        return self.read(manifest.pipeline, manifest.stage, manifest.partition, name), name

    def manifest_names(self, pipeline: str, stage: str, partition: str | None) -> list[str]:
        """List the file names of a partition's manifests, and of its announced publications."""
        return list(self.manifests(pipeline, stage, partition).names())

    def commit(self, manifest: Manifest, names: Sequence[str] | None = None) -> ManifestName:
        """Put a manifest in force after those with some names, or after all of its partition."""
        place = (manifest.pipeline, manifest.stage, manifest.partition)
        names = self.manifest_names(*place) if names is None else names
        taken = [n.sequence for n in map(ManifestName.parse, names) if n is not None]
        name = ManifestName(
            max(taken, default=0) + 1, manifest.generation, manifest.plan, manifest.content
        )
        self.manifests(*place).write(str(name), manifest.dumps())
        return name

    def announce(self, manifest: Manifest) -> str:
        """Record a planned publication, to detect it if this run is killed; return its name."""
        manifests = self.manifests(manifest.pipeline, manifest.stage, manifest.partition)
        name = f"{ANNOUNCED}{manifest.content}.json"
        manifests.write(name, manifest.dumps())
        return name

    def published_before(
        self,
        pipeline: str,
        stage: str,
        partition: str | None,
        names: Collection[str],
        known: Mapping[str, Manifest],
    ) -> Iterator[Sequence[str]]:
        """Yield the published files of manifests, the newest first; open those that are unknown."""
        place = pipeline, stage, partition_folder(partition)
        for name in sorted(names, reverse=True):
            if manifest := known.get(name) or self.opened_if_there(*place, name):
                yield manifest.published_files

    def announced(self, manifest: Manifest, before: float, names: Sequence[str]) -> list[str]:
        """Return those of some names that are of publications announced before a time."""
        place = (manifest.pipeline, manifest.stage, partition_folder(manifest.partition))
        records = (each for each in names if each.startswith(ANNOUNCED))
        written = [(name, self.opened_if_there(*place, name)) for name in records]
        return [name for name, each in written if each and each.committed_at < before]

    def forget_announced(
        self, pipeline: str, stage: str, partition: str | None, announced: list[str]
    ) -> None:
        """Remove records that `announce` wrote."""
        self.manifests(pipeline, stage, partition).delete(announced)

    def existing_parts(self, *folders: StoragePath) -> dict[str, dict[str, StoragePath]]:
        """Return the part files in the folders, by fragment key: name and folder of each.

        Of files with the same name, the last folder's counts. Two runs that computed the same
        fragment at once leave two parts.
        """
        parts: dict[str, dict[str, StoragePath]] = {}
        for folder in folders:
            for name in folder.names():
                if parsed := parse_part_name(name):
                    parts.setdefault(parsed[0], {})[name] = folder
        return parts

    def condemned(self, pipeline: str, stage: str) -> dict[str, float]:
        """Return the parts of a stage that are marked for deletion, here or in the fallback."""

        def parse(record: Any) -> dict[str, float]:
            return {str(path): float(since) for path, since in record.items() if path != FORMAT}

        own = read_file(self.root.child(pipeline, stage), CONDEMNED, parse) or {}
        return own if self.fallback is None else self.fallback.condemned(pipeline, stage) | own

    def condemn(self, pipeline: str, stage: str, part: str) -> None:
        """Mark a part of the fallback, so that this branch computes its fragment."""
        marked = Store(self.root).condemned(pipeline, stage) | {part: time.time()}
        self.root.child(pipeline, stage).write(CONDEMNED, json.dumps(marked).encode())

    def read_record(
        self, folder: Sequence[str], name: str, parse: Callable[[Any], _T], fix: str = "Delete it"
    ) -> _T | None:
        """Read and parse a file of JSON by its folder below the root; None if there is none."""
        for each in self.layers:
            if (record := read_file(each.root.child(*folder), name, parse, fix)) is not None:
                return record
        return None

    def target(self, pipeline: str, stage: str) -> str | None:
        """The URL pattern of a `write` stage's target, as the last run kept it."""
        folder = self.root.child(pipeline, stage)
        return read_file(folder, TARGET, lambda record: str(record["url"]))

    def keep_target(self, pipeline: str, stage: str, url: str) -> None:
        """Store the URL pattern of a `write` stage's target, for garbage collection in it."""
        if self.target(pipeline, stage) != url:
            record = json.dumps({"url": url})
            self.root.child(pipeline, stage).write(TARGET, record.encode())

    def source(self, pipeline: str) -> str | None:
        """Return the description of the source of a pipeline's last run."""
        return self.read_record([pipeline], _SOURCE, lambda record: str(record["source"]))

    def keep_source(self, pipeline: str, source: str) -> None:
        """Store the description of a pipeline's source."""
        self.root.child(pipeline).write(_SOURCE, json.dumps({"source": source}).encode())

    def fragment_rule(self, pipeline: str, default: dict[str, int], keep: bool) -> dict[str, int]:
        """Return a pipeline's stored rule; on first use, `default`, which is stored to keep it."""
        fix = "Fix it, or delete it to restore the default"
        read = functools.partial(self.read_record, [pipeline], _FRAGMENTS, dict, fix)
        if (rule := read()) is None and keep:
            self.root.child(pipeline).create(_FRAGMENTS, json.dumps(default).encode())
            rule = read()  # another run may have been first
        return rule or default


def latest_name(names: Collection[str]) -> ManifestName | None:
    """Return the name of the manifest in force, from the file names in a folder of manifests."""
    parsed = [name for name in map(ManifestName.parse, names) if name is not None]
    if not parsed:
        return None
    in_force = max(parsed, key=lambda n: (n.sequence, n.plan, n.content))
    return replace(in_force, unfinished=any(name.startswith(ANNOUNCED) for name in names))


def open_branch(
    root: str,
    fallback: str,
    options: Mapping[str, Any],
    keeps_code: bool = True,
    targets: Mapping[str, str] | None = None,
) -> Store:
    """Open a store with a fallback. The options reach those of the two that are not local disk."""
    own, other = absolute_url(root).rstrip("/"), absolute_url(fallback).rstrip("/")
    if f"{own}/".startswith(f"{other}/") or f"{other}/".startswith(f"{own}/"):
        raise StoreError(
            f"FragmentStore: root is {own!r} and fallback {other!r}; expected two folders, "
            "neither inside the other. Give the branch its own root"
        )
    place = StoragePath(own, options)
    far = options if place.is_local else place.options_for(other)
    given = {} if place.is_local else options
    read = Store(StoragePath(other, far, is_read_only=True))
    return Store(StoragePath(own, given), keeps_code, read, targets)


def _finished(listed: Mapping[_K, ManifestName]) -> dict[_K, ManifestName]:
    """Return names of manifests as a branch sees them: publications of its fallback are others'."""
    return {key: replace(name, unfinished=False) for key, name in listed.items()}


def copy_files(source: StoragePath, target: StoragePath, names: Iterable[str]) -> None:
    """Copy files of a folder into another, in order."""
    for name in names:
        target.write(name, source.read(name))


def copy_missing(source: StoragePath, target: StoragePath, wanted: Callable[[str], Any]) -> None:
    """Copy the wanted files that a folder lacks; first records that undo one, named "un...".

    So none that was undone is ever in force, wherever the process is killed.
    """
    lacking = source.names().keys() - target.names().keys()
    for name in sorted(lacking, key=lambda name: (not name.startswith("un"), name)):
        if wanted(name):
            target.create(name, source.read(name))


def read_part_info(folder: StoragePath, name: str) -> PartInfo:
    """Read the description of a part in its footer."""
    import pyarrow.parquet as pq

    key, digest = parse_part_name(name) or ("", "")

    def read(file: Any) -> PartInfo:
        metadata = pq.read_metadata(file)
        footer = (metadata.metadata or {})[b"vane"]
        known = {"key": key, "digest": digest, "rows": metadata.num_rows}
        size = file.seek(0, os.SEEK_END)
        return read_part_footer(footer, folder.file_url(name), bytes=size, **known)

    return read_whole(folder, name, read)
