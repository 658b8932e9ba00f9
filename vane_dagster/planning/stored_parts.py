"""The stored parts of a partition."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

from vane_dagster.errors import DamagedPartError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.store import Store, read_part_info

_File = tuple[str, StoragePath]
"""The name of a part's file, and its folder."""


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
        """List the partition's folders."""
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
        named = {} if self._publisher else self._in_force
        self._used_keys = {part.key for part in named.values()}
        self._existing = store.existing_parts(*folders)
        self._names = functools.cache(StoragePath.names)

    def find(
        self,
        candidates: Sequence[Sequence[str]],
        retry: bool = False,
        known: Collection[int] = (),
    ) -> dict[int, Part]:
        """Find a part for each fragment, by the first of some keys; return them by index.

        Keys and parts of the manifest in force come first. Of other keys than those for new parts,
        only that manifest may have parts with failed rows, unless these are to be computed again.

        Args:
            candidates: Keys of all fragments: first those for new parts, then others.
            retry: Whether failed rows of parts with other keys are computed again.
            known: The fragments to skip.
        """
        own, in_force = {*candidates[0]}, self._in_force
        if self._publisher:
            self._published = self._publisher.parts(self._manifest, candidates[0], self._store)

        def counts(part: PartInfo) -> bool:
            return part.key in own or not part.faults or (part.name in in_force and not retry)

        keys_in_force = {part.key for part in in_force.values() if counts(part)}

        def first(files: Sequence[_File]) -> Part | None:
            read = (self._read(file) for file in files)
            return next((part for part in read if part and counts(part.info)), None)

        parts: dict[int, Part] = {}
        unread: dict[int, list[_File]] = {}
        for index, keys in enumerate(zip(*candidates)):
            # Stable: of keys with the same answer, the order stays.
            ranked = sorted(keys, key=lambda key: key not in keys_in_force)
            files = [] if index in known else [each for key in ranked for each in self._files(key)]
            best = in_force.get(files[0][0]) if files else None
            if best and counts(best):
                parts[index] = Part(files[0][1], best)
            elif files:
                unread[index] = files
        found = zip(unread, in_threads(first, unread.values()))
        return parts | {index: part for index, part in found if part}

    def has(self, key: str) -> bool:
        """Return whether a file has a key, or a part from which others may have been computed."""
        return key in self._existing or key in self._published or key in self._used_keys

    def others(self, parts: Collection[Part]) -> tuple[Part, ...]:
        """Return the other parts: neither among `parts` nor in the manifest in force."""
        taken = self._in_force.keys() | {part.info.name for part in parts}
        files = [each for key in self._existing for each in self._files(key)]
        read = in_threads(self._read, [each for each in files if each[0] not in taken])
        return tuple(part for part in read if part is not None)

    def _files(self, key: str) -> list[_File]:
        """Return the files with a key that are not about to be deleted, those in force first."""
        files = dict(self._published.get(key, {}))
        for name, folder in sorted(self._existing.get(key, {}).items()):
            is_named = not (self._publisher or folder.is_read_only) and name in self._in_force
            if is_named or f"{self._label}/{name}" not in self._condemned:
                files.setdefault(name, folder)
        return sorted(files.items(), key=lambda file: file[0] not in self._in_force)

    def _read(self, file: _File) -> Part | None:
        """Read what a part says of itself; None if it is damaged or lacks a file beside it."""
        name, folder = file
        if part := self._in_force.get(name):
            return Part(folder, part)
        try:
            part = read_part_info(folder, name)
        except DamagedPartError as error:
            self.warnings.append(f"{error}. It is computed again")
            return None
        # If two runs wrote the part at once, it names the files of one, the manifest the other's.
        is_whole = all(
            each in self._names(folder) and f"{self._label}/{each}" not in self._condemned
            for each in part.files[:-1]
        )
        return Part(folder, part) if is_whole else None
