"""The stored parts of a partition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from vane_dagster.errors import DamagedPartError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.store import Store, read_part_info

_File = tuple[str, str, StoragePath]
"""A fragment key, and the name and folder of a part with it."""


def stored_parts(
    named: Sequence[Sequence[Sequence[str]]],
    manifest: Manifest | None,
    retry: bool,
    searches: bool,
    store: Store,
    pipeline: Pipeline,
    stage: str,
    partition: str | None,
    condemned: Collection[str],
    warn: Callable[[str], None],
    known: Collection[int] = (),
) -> tuple[tuple[str, ...], dict[int, Part], frozenset[int], tuple[Part, ...]]:
    """Find the parts of a stage's partition by listing its folder, each by the first of some keys.

    Keys and parts of the manifest in force come first. Parts marked for deletion are skipped unless
    that manifest names them and they are not in a fallback. Of earlier generations only that
    manifest may have parts with failed rows, unless these are to be computed again.

    Args:
        named: The keys of the fragments, by generation and definition: the one for new parts first.
        manifest: The manifest in force.
        retry: Whether failed rows of earlier generations are computed again.
        searches: Whether to return all other parts, too.
        store: The store.
        pipeline: The pipeline.
        stage: The stage.
        partition: The partition's key.
        condemned: The parts marked for deletion.
        warn: Receives warnings.
        known: The fragments to skip.

    Returns:
        The key of each fragment, the first one if there is no part; the parts by the fragment's
        index; the indexes of fragments with a part of that key that is about to be deleted; and
        other parts, if they are wanted.
    """
    publisher = pipeline[stage].spec.publisher(partition)
    label, published = partition_folder(partition), dict[str, Mapping[str, StoragePath]]()
    in_force = {part.name: part for part in manifest.parts} if manifest else {}
    own = {key for keys in named[0] for key in keys}

    def counts(key: str, part: PartInfo) -> bool:
        return key in own or not part.faults or (part.name in in_force and not retry)

    keys_in_force = {part.key for part in in_force.values() if counts(part.key, part)}
    # Stable: of keys with the same answer, the order stays.
    ranked = [
        sorted(keys, key=lambda key: key not in keys_in_force)
        for keys in zip(*itertools.chain(*named))
    ]
    chosen, parts = [*named[0][0]], dict[int, Part]()
    if publisher:
        folders, label = [publisher.staging], STAGING
        published |= publisher.parts(manifest, chosen, store)
    else:  # parts of this root come last, which counts
        layers = reversed(store.layers)
        folders = [each.parts(pipeline.name, stage, partition) for each in layers]
    existing = store.existing_parts(*folders)

    def staying(key: str) -> list[_File]:
        """Return the files with a key that are not about to be deleted."""
        files = dict(published.get(key, {}))
        for file, place in sorted(existing.get(key, {}).items()):
            is_named = not (publisher or place.is_read_only) and file in in_force
            if is_named or f"{label}/{file}" not in condemned:
                files.setdefault(file, place)
        return [(key, file, files[file]) for file in sorted(files, key=lambda f: f not in in_force)]

    def leaves(key: str) -> bool:
        return len(staying(key)) < len({*published.get(key, {}), *existing.get(key, {})})

    unread: dict[int, list[_File]] = {}
    for index, keys in enumerate(ranked):
        files = [] if index in known else [each for key in keys for each in staying(key)]
        if files:
            unread[index] = files
    for index, ((key, file, place), *_) in [*unread.items()]:
        if file in in_force and counts(key, in_force[file]):
            del unread[index]
            chosen[index], parts[index] = key, Part(place, in_force[file])
    leaving = {i for i, key in enumerate(chosen) if i not in parts and leaves(key)}
    names = functools.cache(StoragePath.names)

    def has_all(place: StoragePath, part: PartInfo) -> bool:
        # If two runs wrote the part at once, it names the files of one, the manifest the other's.
        *beside, _ = part.files
        return all(n in names(place) and f"{label}/{n}" not in condemned for n in beside)

    read = in_threads(
        lambda files: _first_whole(files, in_force, counts, has_all, warn), unread.values()
    )
    for index, choice in zip(unread, read):
        if choice is not None:
            chosen[index], parts[index] = choice
            leaving |= {index} if leaves(chosen[index]) else set()
    taken = in_force.keys() | {part.info.name for part in parts.values()}
    others = [f for key in existing for f in staying(key) if f[1] not in taken] if searches else []
    found = in_threads(
        lambda file: _first_whole([file], {}, lambda key, part: True, has_all, warn), others
    )
    set_aside = tuple(choice[1] for choice in found if choice is not None)
    return tuple(chosen), parts, frozenset(leaving), set_aside


def _first_whole(
    files: Sequence[_File],
    known: Mapping[str, PartInfo],
    counts: Callable[[str, PartInfo], bool],
    has_all: Callable[[StoragePath, PartInfo], bool],
    warn: Callable[[str], None],
) -> tuple[str, Part] | None:
    """Return the first readable part and its key; None to compute a new one."""
    for key, file, place in files:
        try:
            part = known.get(file) or read_part_info(place, file)
            if counts(key, part) and (file in known or has_all(place, part)):
                return key, Part(place, part)
        except DamagedPartError as error:
            warn(f"{error}. It is computed again")
    return None
