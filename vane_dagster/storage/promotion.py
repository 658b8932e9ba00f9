"""Promotion: the results of a branch become parts of the store that it started from.

A part is named by the key of its fragment, so the next run there finds those that it would compute,
and no other, and commits them. Until then nothing that is in force changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter

from vane_dagster._dataclass import dataclass
from vane_dagster._texts import in_partition
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.adoptions import copy_adoptions
from vane_dagster.storage.definition_texts import DEFINITIONS, file_of
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.reader import in_force
from vane_dagster.storage.schema_pins import SCHEMAS
from vane_dagster.storage.store import Store, copy_files, copy_missing
from vane_dagster.storage.stored_tables import borrow, identity_of

_SETTINGS = ("fragments.json", "types-")
"""What the files of a pipeline begin with that say what its first run determined."""


@dataclass(frozen=True)
class Promoted:
    """A stage whose parts were copied.

    Attributes:
        stage: The stage.
        partitions: Number of partitions that the branch has in force.
        parts: The parts that the other store lacked.
    """

    stage: str
    partitions: int
    parts: Sequence[PartInfo]


def promote(branch: Store, target: Store, pipeline: str) -> Iterator[Promoted]:
    """Copy the parts in force of a branch, those of upstream stages first.

    Stages that publish are left out: a run with the other store publishes them there. A promotion
    that was killed can be run again.

    Args:
        branch: The branch.
        target: The store that it started from.
        pipeline: The pipeline's name.

    Raises:
        StoreError: If the branch has nothing to promote, or the other store has other results of
            the same fragments, from which stages could be mixed.
    """
    own, other = Store(branch.root), Store(target.root)
    committed = own.stages(pipeline)
    every = {stage: [*in_force(own, pipeline, stage, None).values()] for stage in committed}
    made = {s: found for s, found in every.items() if found and found[0].kind != "write"}
    if not made:
        raise StoreError(
            f"{own.root.url!r} has committed nothing of pipeline {pipeline!r} to promote; "
            f"committed there: {names(committed)}. Give the root of a branch, and materialize there"
        )
    manifests = [manifest for found in made.values() for manifest in found]
    lacking = in_threads(lambda manifest: _lacking(other, manifest), manifests)
    _copy_records(own, other, pipeline, manifests)
    above = {stage: {u for each in found for u in each.upstream} for stage, found in made.items()}
    for stage in TopologicalSorter(above).static_order():
        copied = [
            part
            for manifest, parts in zip(manifests, lacking)
            for part in (_copied(own, other, manifest, parts) if manifest.stage == stage else ())
        ]
        if stage in made:
            yield Promoted(stage, len(made[stage]), copied)


def _lacking(store: Store, manifest: Manifest) -> Sequence[PartInfo]:
    """Return the parts of a manifest that a store lacks or is about to delete."""
    folder = store.parts(manifest.pipeline, manifest.stage, manifest.partition)
    present, label = folder.names(), partition_folder(manifest.partition)
    others, leaving = (
        store.existing_parts(folder),
        store.condemned(manifest.pipeline, manifest.stage),
    )
    for part in manifest.parts:
        if part.key in others and part.name not in others[part.key]:
            raise StoreError(
                f"{_label(manifest)}: {store.root.url!r} has computed the same fragments since, "
                "with other results, so nothing was promoted. Materialize there"
            )
    return [
        part
        for part in manifest.parts
        if any(name not in present or f"{label}/{name}" in leaving for name in part.files)
    ]


def _copied(
    own: Store, other: Store, manifest: Manifest, parts: Sequence[PartInfo]
) -> Sequence[PartInfo]:
    target = other.parts(manifest.pipeline, manifest.stage, manifest.partition)
    try:
        in_threads(lambda part: copy_files(own.parts_of(manifest), target, part.files), parts)
    except FileNotFoundError as error:
        raise StoreError(
            f"{_label(manifest)}: a part is gone from the branch: {error}. Materialize it there "
            "again with force"
        ) from error
    return parts


def _label(manifest: Manifest) -> str:
    return f"{manifest.pipeline}/{manifest.stage}{in_partition(manifest.partition)}"


def _copy_records(own: Store, other: Store, pipeline: str, manifests: Sequence[Manifest]) -> None:
    """Copy what plans need besides parts."""
    known, theirs = own.root.child(pipeline), other.root.child(pipeline)
    copy_missing(known, theirs, lambda name: name.startswith(_SETTINGS))
    copy_adoptions(own, other, pipeline)
    urls = {file.url for manifest in manifests for file in manifest.files}
    for identity in filter(None, map(identity_of, urls)):
        borrow(Store(other.root, fallback=own), identity)
    for stage in {manifest.stage for manifest in manifests}:
        texts = {file_of(each.definition) for each in manifests if each.stage == stage}
        for folder, wanted in ((SCHEMAS, bool), (DEFINITIONS, texts.__contains__)):
            copy_missing(known.child(stage, folder), theirs.child(stage, folder), wanted)
