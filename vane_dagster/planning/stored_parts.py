"""The stored parts of a partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vane_dagster.errors import DamagedPartError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.plan import Part
from vane_dagster.storage.filesystem import Location, in_threads
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.store import Store, read_part_info


def stored_parts(
    keys: Sequence[str],
    manifest: Manifest | None,
    store: Store,
    pipeline: Pipeline,
    stage: str,
    partition: str | None,
    condemned: Collection[str],
    warn: Callable[[str], None],
    *,
    known: Collection[int] = (),
) -> tuple[dict[int, Part], frozenset[int]]:
    """Find the parts of a stage's partition by listing its folder.

    Parts that the manifest in force names are preferred. Parts marked for deletion that it does
    not name are skipped.
    """
    publisher = pipeline[stage].spec.publisher(partition)
    folder = store.parts(pipeline.name, stage, partition)
    label = partition_folder(partition)
    if publisher:
        folder, label = publisher.staging, STAGING
    folders = [folder]
    if not publisher:  # parts of this root come last, which counts
        layers = reversed(store.layers)
        folders = [each.parts(pipeline.name, stage, partition) for each in layers]
    existing = store.existing_parts(*folders)
    named = {part.name: part for part in manifest.parts} if manifest else {}
    published = publisher.parts(manifest, keys, store) if publisher else None
    found: dict[int, Part] = {}
    leaving = set()
    unread: dict[int, dict[str, Location]] = {}
    for index, key in enumerate(keys):
        if index in known:
            continue
        staged = existing.get(key, {})
        if published is None:
            staying = {file: place for file, place in staged.items() if file in named}
        else:
            staying = dict(published.get(key, {}))
        for file, place in sorted(staged.items()):
            if f"{label}/{file}" not in condemned:
                staying.setdefault(file, place)
        if not staying.keys() >= staged.keys():
            leaving.add(index)
        if in_manifest := [file for file in staying if file in named]:
            found[index] = Part(staying[in_manifest[0]], named[in_manifest[0]])
            leaving.discard(index)
        elif staying:
            unread[index] = staying
    read = in_threads(lambda files: _first_whole(files, warn), unread.values())
    found |= {index: part for index, part in zip(unread, read) if part}
    return found, frozenset(leaving)


def equal_parts(
    named: Sequence[Sequence[str]], manifest: Manifest | None, *where: Any
) -> tuple[tuple[str, ...], dict[int, Part], frozenset[int]]:
    """Find a stage's parts, each by the first of some keys that the store has, and those keys.

    The further arguments are those of `stored_parts`. Keys in the manifest in force come first. A
    fragment without a part has its first key.
    """
    in_force = {part.key for part in manifest.parts} if manifest else set()
    own = tuple(named[0])
    # Stable: of keys with the same answer, the order stays.
    ranked = [sorted(keys, key=lambda key: key not in in_force) for keys in zip(*named)]
    chosen, parts, leaving = list(own), dict[int, Part](), frozenset[int]()
    for keys in zip(*ranked):
        found, doubtful = stored_parts(keys, manifest, *where, known=parts)
        leaving |= {i for i in doubtful if i in found or keys[i] == own[i]}
        parts |= found
        for index in found:
            chosen[index] = keys[index]
        if len(parts) == len(own):
            break
    return tuple(chosen), parts, leaving


def _first_whole(candidates: Mapping[str, Location], warn: Callable[[str], None]) -> Part | None:
    """Return the first readable part of a fragment's candidates; None to compute a new one."""
    for file in candidates:
        try:
            return Part(candidates[file], read_part_info(candidates[file], file))
        except DamagedPartError as error:
            warn(f"{error}. It is computed again")
    return None
