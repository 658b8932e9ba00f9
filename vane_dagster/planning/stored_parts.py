"""The stored parts of a partition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from vane_dagster.errors import DamagedPartError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.store import Store, read_part_info


class _File(NamedTuple):
    key: str
    name: str
    folder: StoragePath


class Found(NamedTuple):
    """What is stored of a plan's fragments.

    Attributes:
        keys: The key of each fragment. A fragment without a part has the key for new parts.
        parts: The parts, by the fragment's index.
        leaving: The indexes of fragments with a part of their key that is about to be deleted.
    """

    keys: tuple[str, ...]
    parts: dict[int, Part]
    leaving: frozenset[int]


class StoredParts:
    """The parts of a stage's partition, listed once.

    Parts marked for deletion are skipped, unless the manifest in force names them and they are not
    in a fallback.

    Attributes:
        warnings: The damaged parts that were skipped.
    """

    def __init__(
        self,
        store: Store,
        pipeline: Pipeline,
        stage: str,
        partition: str | None,
        manifest: Manifest | None,
        condemned: Collection[str],
    ) -> None:
        """List the partition's folders.

        Args:
            store: The store.
            pipeline: The pipeline.
            stage: The stage.
            partition: The partition's key.
            manifest: The manifest in force.
            condemned: The parts of the stage marked for deletion.
        """
        self.warnings: list[str] = []
        self._store, self._manifest, self._condemned = store, manifest, condemned
        self._in_force = {part.name: part for part in manifest.parts} if manifest else {}
        self._published: Mapping[str, Mapping[str, StoragePath]] = {}
        self._publisher = pipeline[stage].spec.publisher(partition)
        if self._publisher:
            folders, self._label = [self._publisher.staging], STAGING
        else:  # parts of this root come last, which counts
            layers = reversed(store.layers)
            folders = [each.parts(pipeline.name, stage, partition) for each in layers]
            self._label = partition_folder(partition)
        self._existing = store.existing_parts(*folders)
        self._names = functools.cache(StoragePath.names)

    def find(
        self,
        named: Sequence[Sequence[Sequence[str]]],
        retry: bool = False,
        known: Collection[int] = (),
    ) -> Found:
        """Find a part for each fragment, by the first of some keys.

        Keys and parts of the manifest in force come first. Of earlier generations only that
        manifest may have parts with failed rows, unless these are to be computed again.

        Args:
            named: The keys of the fragments, by generation and definition: the one for new parts
                first.
            retry: Whether failed rows of earlier generations are computed again.
            known: The fragments to skip.
        """
        chosen, parts, in_force = [*named[0][0]], dict[int, Part](), self._in_force
        own = {key for keys in named[0] for key in keys}
        if self._publisher:
            self._published = self._publisher.parts(self._manifest, chosen, self._store)

        def counts(key: str, part: PartInfo) -> bool:
            return key in own or not part.faults or (part.name in in_force and not retry)

        keys_in_force = {part.key for part in in_force.values() if counts(part.key, part)}

        def first(files: Sequence[_File]) -> tuple[str, Part] | None:
            parts = ((file.key, self._read(file)) for file in files)
            return next(((k, part) for k, part in parts if part and counts(k, part.info)), None)

        unread: dict[int, list[_File]] = {}
        for index, keys in enumerate(zip(*itertools.chain(*named))):
            # Stable: of keys with the same answer, the order stays.
            ranked = sorted(keys, key=lambda key: key not in keys_in_force)
            files = [] if index in known else [each for key in ranked for each in self._files(key)]
            best = in_force.get(files[0].name) if files else None
            if best and counts(files[0].key, best):
                chosen[index], parts[index] = files[0].key, Part(files[0].folder, best)
            elif files:
                unread[index] = files
        leaving = {i for i, key in enumerate(chosen) if i not in parts and self._leaves(key)}
        for index, choice in zip(unread, in_threads(first, unread.values())):
            if choice is not None:
                chosen[index], parts[index] = choice
                leaving |= {index} if self._leaves(chosen[index]) else set()
        return Found(tuple(chosen), parts, frozenset(leaving))

    def others(self, parts: Collection[Part]) -> tuple[Part, ...]:
        """Return the other parts: neither among `parts` nor in the manifest in force."""
        taken = self._in_force.keys() | {part.info.name for part in parts}
        files = [each for key in self._existing for each in self._files(key)]
        read = in_threads(self._read, [each for each in files if each.name not in taken])
        return tuple(part for part in read if part is not None)

    def _files(self, key: str) -> list[_File]:
        """Return the files with a key that are not about to be deleted, those in force first."""
        files = dict(self._published.get(key, {}))
        for name, folder in sorted(self._existing.get(key, {}).items()):
            is_named = not (self._publisher or folder.is_read_only) and name in self._in_force
            if is_named or f"{self._label}/{name}" not in self._condemned:
                files.setdefault(name, folder)
        names = sorted(files, key=lambda name: name not in self._in_force)
        return [_File(key, name, files[name]) for name in names]

    def _leaves(self, key: str) -> bool:
        """Return whether a file with a key is about to be deleted."""
        present = {*self._published.get(key, {}), *self._existing.get(key, {})}
        return len(self._files(key)) < len(present)

    def _read(self, file: _File) -> Part | None:
        """Read what a part says of itself; None if it is damaged or lacks a file beside it."""
        try:
            part = self._in_force.get(file.name) or read_part_info(file.folder, file.name)
        except DamagedPartError as error:
            self.warnings.append(f"{error}. It is computed again")
            return None
        return Part(file.folder, part) if self._is_whole(file, part) else None

    def _is_whole(self, file: _File, part: PartInfo) -> bool:
        # If two runs wrote the part at once, it names the files of one, the manifest the other's.
        *beside, _ = part.files
        return file.name in self._in_force or all(
            name in self._names(file.folder) and f"{self._label}/{name}" not in self._condemned
            for name in beside
        )
