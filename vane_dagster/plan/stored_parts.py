"""Which parts of a partition the store holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from vane_dagster.commit.folders import partition_folder
from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import ManifestName
from vane_dagster.commit.publish import STAGING, publisher_of
from vane_dagster.commit.store import Store, read_part_info
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.errors import DamagedPartError
from vane_dagster.plan.plan import Part

_READERS = 16


def stored_parts(
    store: Store,
    pipeline: Pipeline,
    stage: str,
    partition: str | None,
    keys: Sequence[str],
    in_force: ManifestName | None,
    condemned: Collection[str],
    warn: Callable[[str], None],
    known: Collection[int] = (),
) -> tuple[dict[int, Part], frozenset[int]]:
    """Finds the parts of a stage's partition by listing its folder.

    Parts that the manifest in force names come first. Condemned parts that it does not name are
    about to be deleted and are passed over.

    Args:
        store: The store.
        pipeline: The pipeline.
        stage: The stage.
        partition: The partition's key.
        keys: The fragment keys.
        in_force: The manifest in force.
        condemned: Names of the stage's condemned parts, as `Store.condemned` gives them.
        warn: Takes a line about each damaged part, which is passed over.
        known: Indexes of `keys` to leave out.

    Returns:
        The parts by index of `keys`, and the indexes of which a condemned part was passed over.
    """
    publisher = publisher_of(pipeline[stage].spec, partition)
    folder = store.parts(pipeline.name, stage, partition)
    label = partition_folder(partition)
    if publisher:
        folder, label = publisher.staging, STAGING
    existing = store.existing_parts(folder)
    manifest = None
    if in_force:
        manifest = store.read(pipeline.name, stage, partition, in_force)
    named = {part.name: part for part in manifest.parts} if manifest else {}
    published = publisher.parts(manifest, keys, store) if publisher else None
    found: dict[int, Part] = {}
    leaving = set()
    unread: dict[int, dict[str, Location]] = {}
    for index, fragment_key in enumerate(keys):
        if index in known:
            continue
        candidates = existing.get(fragment_key, {})
        if published is None:
            staying = {file: place for file, place in candidates.items() if file in named}
        else:
            staying = dict(published.get(fragment_key, {}))
        for file, place in candidates.items():
            if f"{label}/{file}" not in condemned:
                staying.setdefault(file, place)
        if in_manifest := [file for file in staying if file in named]:
            found[index] = Part(staying[in_manifest[0]], named[in_manifest[0]])
            continue
        if not staying.keys() >= candidates.keys():
            leaving.add(index)
        if staying:
            unread[index] = staying
    with ThreadPoolExecutor(max_workers=_READERS) as threads:
        read = threads.map(lambda files: _first_whole(files, warn), unread.values())
        found |= {index: part for index, part in zip(unread, read) if part}
    return found, frozenset(leaving)


def _first_whole(candidates: Mapping[str, Location], warn: Callable[[str], None]) -> Part | None:
    """Of several parts for a fragment the first that says what it is; None to make another."""
    for file in sorted(candidates):
        try:
            return Part(candidates[file], read_part_info(candidates[file], file))
        except DamagedPartError as error:
            warn(f"{error}. It is computed again")
    return None
