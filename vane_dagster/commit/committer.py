"""Commits partitions on a thread of its own, so that storage never stalls workers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import FileRecord, Manifest, ManifestName
from vane_dagster.commit.publish import promote, retire
from vane_dagster.commit.store import Store
from vane_dagster.errors import SourceError, StoreError, VaneError, names


@dataclass(frozen=True)
class Commit:
    """A partition of a stage whose parts are all there.

    Attributes:
        manifest: The record to put in force, without the content hashes of files and the upstream.
        folder: Where the parts are.
        publish: For a `write` stage: target and staging folder.
        former: The manifest in force before.
        unique: Name of the id, where ids have to be checked across the fragments; else None.
        upstream: Manifest names of upstream stages that this run does not commit.
        waits_for: Upstream stages that this run commits.
        done: Called with what came of it.
    """

    manifest: Manifest
    folder: Location
    publish: tuple[Location, Location] | None
    former: ManifestName | None
    unique: str | None
    upstream: Mapping[str, str]
    waits_for: Sequence[str]
    done: Callable[[Manifest, ManifestName | VaneError], None]


class Committer:
    """Puts manifests in force, in the order in which it is given them.

    Args:
        store: Where manifests go.
        hash_file: Gives the content hash of a local source file.
    """

    def __init__(self, store: Store, hash_file: Callable[[FileRecord], str]) -> None:
        self._store = store
        self._hash_file = hash_file
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vane-hash")
        self._queue: queue.Queue[Commit | None] = queue.Queue()
        self._outcomes: dict[tuple[str | None, str], ManifestName | VaneError] = {}
        self._hashes: dict[tuple[str, str], Future[str]] = {}
        self._thread = threading.Thread(target=self._work, name="vane-commit", daemon=True)
        self._thread.start()

    def hash_ahead(self, files: Sequence[FileRecord]) -> None:
        """Begins to hash local source files, which a commit will want."""
        for file in files:
            known = (file.url, file.version)
            if file.content is None and file.url.startswith("file:") and known not in self._hashes:
                self._hashes[known] = self._hasher.submit(self._hash_file, file)

    def put(self, commit: Commit) -> None:
        """Queues a commit."""
        self._queue.put(commit)

    def close(self) -> None:
        """Waits until all is committed."""
        self._queue.put(None)
        self._thread.join()
        self._hasher.shutdown(cancel_futures=True)

    def _work(self) -> None:
        while (commit := self._queue.get()) is not None:
            manifest = commit.manifest
            try:
                manifest = self._completed(commit)
                outcome: ManifestName | VaneError = self._put_in_force(commit, manifest)
            except VaneError as error:
                outcome = error
            except Exception as error:
                outcome = StoreError(
                    f"{manifest.pipeline}/{manifest.stage} could not be committed: "
                    f"{type(error).__name__}: {error}"
                )
            self._outcomes[manifest.partition, manifest.stage] = outcome
            commit.done(manifest, outcome)

    def _completed(self, commit: Commit) -> Manifest:
        upstream = dict(commit.upstream)
        for stage in commit.waits_for:
            outcome = self._outcomes[commit.manifest.partition, stage]
            if isinstance(outcome, VaneError):
                raise StoreError(f"its upstream {stage!r} was not committed: {outcome}")
            upstream[stage] = str(outcome)
        self.hash_ahead(commit.manifest.files)
        files = [self._hashed(file) for file in commit.manifest.files]
        return replace(commit.manifest, files=files, upstream=upstream, committed_at=time.time())

    def _hashed(self, file: FileRecord) -> FileRecord:
        future = self._hashes.get((file.url, file.version))
        return file if future is None else replace(file, content=future.result())

    def _put_in_force(self, commit: Commit, manifest: Manifest) -> ManifestName:
        if commit.unique:
            check_unique(manifest, commit.folder, commit.unique)
        if commit.publish:
            promote(*commit.publish, manifest.parts)
        name = self._store.commit(manifest)
        if commit.publish and commit.former:
            former = self._store.read(
                manifest.pipeline, manifest.stage, manifest.partition, commit.former
            )
            retire(commit.publish[0], former.parts, manifest.parts)
        return name


def check_unique(manifest: Manifest, folder: Location, id: str) -> None:
    """Checks that no id is in two fragments; opens parts only where their ranges of ids overlap.

    Raises:
        SourceError: If one is, naming the files.
    """
    ranges = sorted(
        (
            (part.id_min, part.id_max, index)
            for index, part in enumerate(manifest.parts)
            if part.rows
        ),
        key=lambda item: (item[0], item[1]),
    )
    overlapping: set[int] = set()
    highest: Any = None
    holder = -1
    for low, high, index in ranges:
        if holder >= 0 and low <= highest:
            overlapping |= {holder, index}
        if holder < 0 or high > highest:
            highest, holder = high, index
    if not overlapping:
        return
    parts = [folder.file(manifest.parts[index].name) for index in sorted(overlapping)]
    repeated = _repeated_ids(folder, parts, id)
    if repeated:
        files = {manifest.fragments[index].url for index in overlapping}
        raise SourceError(
            f"stage '{manifest.pipeline}/{manifest.stage}': ids {names(repeated)} of {id!r} are in "
            f"more than one fragment of the partition, among {names(sorted(files))}; an id must be "
            "unique inside a partition. Mend the source"
        )


def _repeated_ids(folder: Location, paths: Sequence[str], id: str) -> list[Any]:
    column = '"' + id.replace('"', '""') + '"'
    with contextlib.closing(duckdb.connect()) as connection:
        if not folder.is_local:
            connection.register_filesystem(folder.fs)
            paths = [folder.fs.unstrip_protocol(path) for path in paths]
        found = connection.execute(
            f"SELECT {column} FROM read_parquet(?) GROUP BY 1 HAVING count(*) > 1 LIMIT 6",
            [list(paths)],
        )
        return [row[0] for row in found.fetchall()]
