"""What a store holds: the results in force, from manifests.

At most `_AT_ONCE` manifests are in memory at a time, and one line for each folder of a partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vane_dagster.storage.batch_records import BATCHES
from vane_dagster.storage.filesystem import StoragePath, in_threads
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.quarantine import FAILED
from vane_dagster.storage.shipped_files import FILES
from vane_dagster.storage.store import PUBLISHED, Store
from vane_dagster.storage.stored_tables import TABLES

_AT_ONCE = 64
_OTHERS = (FILES, TABLES, PUBLISHED)
"""Folders of a store that are none of a pipeline."""


@dataclass
class Results:
    """Results in force of a stage, or of a partition of one.

    Attributes:
        stage: Pipeline and stage, such as "docs/embedding".
        partition: The partition key, if it is one of a partitioned stage.
        partitions: Number of partitions.
        rows: Number of rows.
        parts: Number of parts.
        bytes: Size of the parts.
        committed_at: Unix time in seconds of the last commit; 0 without any.
    """

    stage: str
    partition: str | None = None
    partitions: int = 0
    rows: int = 0
    parts: int = 0
    bytes: int = 0
    committed_at: float = 0.0

    def add(self, manifest: Manifest) -> None:
        """Add a partition."""
        self.partitions += 1
        self.rows += manifest.rows
        self.parts += len(manifest.parts)
        self.bytes += manifest.size
        self.committed_at = max(self.committed_at, manifest.committed_at)


def results(store: Store, path: str = "") -> Iterator[Results]:
    """Yield the results of each stage below a path, or of each partition of a stage."""
    pipeline, _, stage = path.strip("/").partition("/")
    for name in [pipeline] if pipeline else pipeline_folders(store.root):
        for each in [stage] if stage else store.stages(name):
            total = Results(label := f"{name}/{each}")
            for manifest in _in_force(store, name, each):
                total = Results(label, manifest.partition) if stage else total
                total.add(manifest)
                if stage:
                    yield total
            if not stage:
                yield total


def forget(
    store: Store, path: str, keys: Collection[str], before: str = "", dry_run: bool = False
) -> Iterator[Results]:
    """Delete all versions and failed rows of partitions, and yield what was in force of them.

    Their parts are then garbage. Of a whole stage, what its runs left without a version is deleted
    too: failed rows and batches of a provider.

    Args:
        store: The store. Of a branch, its own partitions.
        path: A pipeline, or a stage as "docs/embedding".
        keys: The partitions. Of a stage, all are meant if neither they nor `before` is given.
        before: Partitions with a key that precedes this text are meant, too.
        dry_run: Whether to change nothing.
    """
    own = Store(store.root)
    pipeline, _, only = path.strip("/").partition("/")
    every = bool(only) and not keys and not before
    for stage in [only] if only else own.stages(pipeline):
        for manifest in _in_force(own, pipeline, stage):
            key = manifest.partition
            if every or (key is not None and (key in keys or key < before)):
                result = Results(f"{pipeline}/{stage}", key)
                result.add(manifest)
                for name in () if dry_run else ("manifests", FAILED):
                    folder = own.root.child(pipeline, stage, name, partition_folder(key))
                    folder.delete(sorted(folder.entries()))
                yield result
        for name in (FAILED, BATCHES) if every else ():
            folder = own.root.child(pipeline, stage, name)
            if left := sorted(folder.entries()):
                if not dry_run:
                    folder.delete(left)
                yield Results(f"{pipeline}/{stage}")


def _in_force(store: Store, pipeline: str, stage: str) -> Iterator[Manifest]:
    """Yield the manifests in force of a stage, by partition."""
    listed = sorted(store.latest_of_all(pipeline, stage).items())

    def opened(place: tuple[str, object]) -> Manifest | None:
        return store.opened_if_there(pipeline, stage, place[0], str(place[1]))

    for start in range(0, len(listed), _AT_ONCE):
        yield from filter(None, in_threads(opened, listed[start : start + _AT_ONCE]))


def pipeline_folders(root: StoragePath) -> list[str]:
    """Return the folders of the pipelines below a store's root."""
    return [name for name in root.folders() if name not in _OTHERS]
