"""Commits partitions on separate threads, so that storage never stalls workers.

All commits of a partition are made by one thread, in the order of `put`. If a check compares
partitions, one thread makes the commits of all.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from vane_dagster._private_folder import temporary_folder
from vane_dagster._texts import in_partition
from vane_dagster.checks.builtin import has_lost_rows, has_too_many_failed_rows
from vane_dagster.errors import (
    DamagedPartError,
    FailedRowsError,
    IntegrityError,
    SourceError,
    StoreError,
    VaneError,
    described,
    names,
)
from vane_dagster.planning.plan import Part
from vane_dagster.storage.damage import damage_of
from vane_dagster.storage.filesystem import StoragePath, duckdb_path, in_threads
from vane_dagster.storage.manifest import CheckResult, FileRecord, Manifest, ManifestName
from vane_dagster.storage.publish.base import Publisher, publish
from vane_dagster.storage.store import Store, copy_files
from vane_dagster.types.duckdb_connection import connect
from vane_dagster.types.sql import quote

_MAX_MEMORY = "1GB"
_SYNCERS = 4
_THREADS = 8
"""Threads that commit; they spend their time waiting for storage."""
_WRITTEN_BACK_SECONDS = 3600.0
"""After which the kernel has written a file to the disk, which takes it half a minute."""


@dataclass(frozen=True)
class Commit:
    """A partition of a stage with all its parts present.

    Attributes:
        manifest: The manifest to put in force, without the content hashes of files and `upstream`.
        folder: Folder of the parts.
        publish: Publisher of a `write` stage.
        unique: Name of the id column if ids must be checked across fragments; else None.
        upstream: The manifests of the upstream stages; None of those that this run commits.
        opened: Those that are open already.
        figures: Returns what the partition took, for its manifest. Called once, before the commit.
        borrowed: Parts of the manifest in the fallback of a branch, to copy into `folder`.
        done: Called with the manifest and the outcome.
        former: The manifest that was in force when the run was planned.
    """

    manifest: Manifest
    folder: StoragePath
    publish: Publisher | None
    unique: str | None
    upstream: Mapping[str, ManifestName | None]
    opened: Mapping[str, Manifest]
    figures: Callable[[Manifest], Mapping[str, Any]]
    done: Callable[[Manifest, ManifestName | VaneError], None]
    former: ManifestName | None = None
    borrowed: Sequence[Part] = ()


class WithheldError(StoreError):
    """Error of a partition with an uncommitted upstream."""

    def __init__(self, upstream: str, error: VaneError) -> None:
        super().__init__(f"its upstream stage {upstream!r} was not committed: {error}")
        self.upstream = upstream


class BlockedError(VaneError):
    """Error of a partition with an upstream that failed a blocking check."""

    is_permanent = True

    def __init__(self, upstream: str, check: CheckResult, former: ManifestName | None) -> None:
        kept = "; its former version stays in force" if former else "; it has no former version"
        super().__init__(
            f"blocking check {check.name!r} of the upstream stage {upstream!r} failed: "
            f"{check.description}. The partition was not committed{kept}"
        )


class Committer:
    """Commits manifests; see the module for their order."""

    def __init__(
        self,
        store: Store,
        hash_file: Callable[[FileRecord], str | None],
        publishing: Callable[[Manifest], AbstractContextManager[None]],
        evaluate_checks: Callable[[Manifest], tuple[CheckResult, ...]],
        in_order: bool = False,
    ) -> None:
        self._began = time.time()
        self._publishing, self._evaluate_checks = publishing, evaluate_checks
        self._store = store
        self._hash_file = hash_file
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vane-hash")
        self._syncer = ThreadPoolExecutor(max_workers=_SYNCERS, thread_name_prefix="vane-sync")
        # By folder and name: partitions that read the same file have parts of equal names.
        self._syncs: dict[tuple[str, str], Future[None]] = {}
        self._queues: list[queue.SimpleQueue[Commit | None]] = []
        self._threads: list[threading.Thread] = []
        self._thread_of: dict[str | None, int] = {}  # by partition
        self._most_threads = 1 if in_order else _THREADS
        self._transactions: dict[str, threading.Lock] = {}  # by `write` stage
        self._unique_lock = threading.Lock()
        self._outcomes: dict[tuple[str | None, str], ManifestName | VaneError] = {}
        self._check_results: dict[tuple[str | None, str], Sequence[CheckResult]] = {}
        self._hashes: dict[tuple[str, str], Future[str | None]] = {}
        self._error: BaseException | None = None

    def hash_ahead(self, files: Sequence[FileRecord]) -> None:
        """Start hashing local source files that a later commit needs."""
        for file in files:
            known = (file.url, file.version)
            if file.content is None and file.url.startswith("file:") and known not in self._hashes:
                self._hashes[known] = self._hasher.submit(self._hash_file, file)

    def sync_ahead(self, part: Part) -> None:
        """Start syncing the files of a part that a later commit names."""
        for name in part.info.files:
            self._syncs[part.folder.url, name] = self._syncer.submit(part.folder.sync, name)

    def _sync(self, folder: StoragePath, manifest: Manifest) -> None:
        """Wait until the disk has all parts that may have been written a short time ago."""
        recent = time.time() - _WRITTEN_BACK_SECONDS
        for part in manifest.parts:
            is_synced = (folder.url, part.name) in self._syncs
            if part.made and part.made.at > recent and not is_synced:
                self.sync_ahead(Part(folder, part))
        for name in (name for part in manifest.parts for name in part.files):
            if (synced := self._syncs.pop((folder.url, name), None)) is not None:
                synced.result()

    def put(self, commit: Commit) -> None:
        """Queue a commit on the thread of its partition. Called by one thread."""
        partition = commit.manifest.partition
        number = self._thread_of.setdefault(partition, len(self._thread_of) % self._most_threads)
        if number == len(self._threads):
            self._queues.append(queue.SimpleQueue())
            thread = threading.Thread(
                target=self._work, args=self._queues[-1:], name="vane-commit", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._queues[number].put(commit)

    def close(self) -> None:
        """Wait until all queued commits are done; raise the error that has ended commits."""
        for commits in self._queues:
            commits.put(None)
        for thread in self._threads:
            thread.join()
        self._hasher.shutdown(cancel_futures=True)
        self._syncer.shutdown(cancel_futures=True)
        if self._error is not None:
            raise self._error

    def _work(self, commits: queue.SimpleQueue[Commit | None]) -> None:
        while (commit := commits.get()) is not None:
            try:
                if self._error is None:
                    self._commit(commit)
            except BaseException as error:  # `close` raises it
                self._error = error

    def _commit(self, commit: Commit) -> None:
        manifest = commit.manifest
        try:
            outcome: ManifestName | VaneError
            manifest, outcome = self._put_in_force(commit, self._completed(commit))
        except BaseException as error:  # extensions in Rust raise others than Exception
            if isinstance(error, VaneError) and not isinstance(error, DamagedPartError):
                outcome = error
            else:
                outcome = StoreError(
                    f"{manifest.pipeline}/{manifest.stage} could not be committed: "
                    f"{described(error)}{self._removed(commit)}"
                )
        self._outcomes[manifest.partition, manifest.stage] = outcome
        commit.done(manifest, outcome)

    def _removed(self, commit: Commit) -> str:
        """Remove damaged parts, which may have caused a failed commit; return a message."""
        folder = commit.publish.staging if commit.publish else commit.folder
        message = ""
        try:
            present = folder.names()
            for part in (part for part in commit.manifest.parts if part.name in present):
                if damage := next(filter(None, (damage_of(folder, n) for n in part.files)), None):
                    folder.delete([part.name])
                    message += f". {damage}; it was removed. Run again to recompute it"
        except Exception:
            return message  # the storage fails, which the original error already reports
        return message

    def _completed(self, commit: Commit) -> Manifest:
        upstream = {}
        for stage, name in commit.upstream.items():
            outcome = name or self._outcomes[commit.manifest.partition, stage]
            if isinstance(outcome, VaneError):
                raise WithheldError(stage, outcome)
            upstream[stage] = str(outcome)
        self.hash_ahead(commit.manifest.files)
        hashes = [self._hashes.get((each.url, each.version)) for each in commit.manifest.files]
        files = [
            replace(file, content=hashed.result()) if hashed else file
            for file, hashed in zip(commit.manifest.files, hashes)
        ]
        return replace(
            commit.manifest,
            files=files,
            upstream=upstream,
            committed_at=time.time(),
            branched_from=self._branched_from(commit),
        )

    def _branched_from(self, commit: Commit) -> str:
        """Return the manifest of the fallback that a branch's partition replaces."""
        place = (commit.manifest.pipeline, commit.manifest.stage, commit.manifest.partition)
        if self._store.fallback is None:
            return ""
        if (own := self._store.latest_own(*place)) is None:
            return "" if commit.former is None else str(commit.former)
        above = self._store.fallback.latest_own(*place)
        if above is not None and above.version == own.version:  # it was promoted
            return str(above)
        return self._store.read(*place, own).branched_from

    def _borrow(self, commit: Commit) -> None:
        """Copy parts of the fallback, so that the branch has all parts of its manifest."""
        in_threads(lambda p: copy_files(p.folder, commit.folder, p.info.files), commit.borrowed)

    def _require_unblocked(self, commit: Commit, manifest: Manifest) -> None:
        """Raise BlockedError if a blocking check of an upstream stage has failed."""
        partition = manifest.partition
        for stage, name in commit.upstream.items():
            if name is not None and (partition, stage) not in self._check_results:
                place = (manifest.pipeline, stage, partition)
                above = commit.opened.get(stage) or self._store.read(*place, name)
                self._check_results[partition, stage] = self._evaluate_checks(above)
            for result in self._check_results[partition, stage]:
                if result.blocks:
                    raise BlockedError(stage, result, commit.former)

    def _record_checks(self, manifest: Manifest) -> Manifest:
        """Evaluate and record the checks of a manifest; return it with their results."""
        partition = manifest.partition
        results_here = self._evaluate_checks(manifest)
        place = f"stage '{manifest.pipeline}/{manifest.stage}'{in_partition(partition)}"
        for result in results_here:
            if not result.passed and has_lost_rows(result.name, result.metadata):
                fix = "The partition was not committed. Materialize it with force"
                raise IntegrityError(f"{place}: {result.description}. {fix}")
            if result.blocking and has_too_many_failed_rows(result.metadata):
                fix = (
                    "The partition was not committed. `vane-dagster quarantine` lists the rows, "
                    "and the next run computes the failed rows again"
                )
                raise FailedRowsError(f"{place}: {result.description}. {fix}")
        self._check_results[partition, manifest.stage] = results_here
        return replace(manifest, checks=results_here)

    def _put_in_force(self, commit: Commit, manifest: Manifest) -> tuple[Manifest, ManifestName]:
        """Commit, unless another run has committed the same parts since this one was planned."""
        self._require_unblocked(commit, manifest)
        self._borrow(commit)
        self._sync(commit.publish.staging if commit.publish else commit.folder, manifest)
        if not commit.publish:
            manifest = self._verified(commit, manifest)
            return self._store.commit_once(manifest, commit.former)
        with self._publishing(manifest):
            place = (manifest.pipeline, manifest.stage, manifest.partition)
            names = self._store.manifest_names(*place)
            if other := self._store.committed_since(manifest, commit.former, names):
                in_force = other[0]
                if commit.publish.holds(in_force.published_files):
                    self._check_results[manifest.partition, manifest.stage] = self._evaluate_checks(
                        in_force
                    )
                    return other
            manifest = self._verified(commit, manifest)
            return publish(
                self._store, commit.publish, manifest, self._began, names, self._transaction(commit)
            )

    def _transaction(self, commit: Commit) -> AbstractContextManager[Any]:
        """The lock of a table: transactions in parallel would only conflict with each other."""
        assert commit.publish is not None
        if commit.publish.has_folder_per_partition:
            return contextlib.nullcontext()
        return self._transactions.setdefault(commit.manifest.stage, threading.Lock())

    def _verified(self, commit: Commit, manifest: Manifest) -> Manifest:
        """Return a manifest that may be committed, with the results of its checks and figures."""
        manifest = self._record_checks(manifest)
        if commit.unique:
            with self._unique_lock:  # it may take _MAX_MEMORY
                check_unique(manifest, commit.folder, commit.unique)
        return replace(manifest, figures=commit.figures(manifest))


def check_unique(manifest: Manifest, folder: StoragePath, id: str) -> None:
    """Check that no id is in two fragments; open parts only if their id ranges overlap."""
    parts = {part.name: i for i, part in enumerate(manifest.parts) if part.rows}
    ranges = sorted((manifest.parts[i].id_min, manifest.parts[i].id_max) for i in parts.values())
    highest = itertools.accumulate((high for _, high in ranges), max)
    if all(low > before for before, (low, _) in zip(highest, ranges[1:])):
        return
    repeated, files = _repeated_ids(folder, list(parts), id)
    if repeated:
        places = [str(manifest.fragments[parts[name]]) for name in files]
        raise SourceError(
            f"stage '{manifest.pipeline}/{manifest.stage}'{in_partition(manifest.partition)}: ids "
            f"such as {repeated} of {id!r} are in more than one fragment: {names(places)}; an id "
            "must be unique inside a partition. Fix the source, or pass several columns as the "
            "pipeline's id"
        )


def _repeated_ids(folder: StoragePath, parts: Sequence[str], id: str) -> tuple[str, list[str]]:
    """Some repeated ids, and the parts that hold them."""
    paths = [duckdb_path(folder.fs, folder.file(part)) for part in parts]
    with temporary_folder() as spill, contextlib.closing(connect()) as connection:
        connection.execute(f"SET memory_limit='{_MAX_MEMORY}'")
        connection.execute("SET temp_directory=?", [str(spill)])
        if not folder.is_local:
            connection.register_filesystem(folder.fs)
        repeated = connection.execute(
            f"SELECT {quote(id)} AS id, list(filename) FROM read_parquet(?, filename=true) "
            "GROUP BY 1 HAVING count(*) > 1 ORDER BY 1 LIMIT 3",
            [paths],
        ).fetchall()
    files = {PurePosixPath(path).name for _, paths in repeated for path in paths}
    return ", ".join(repr(id) for id, _ in repeated), sorted(files)
