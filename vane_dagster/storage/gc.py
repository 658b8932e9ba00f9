"""Garbage collection: the safe removal of files that no manifest in force needs.

A part is removed in two steps. The first collection marks it for deletion in `condemned.json`
(the file's name is part of the store's format), and from then on no plan builds on it. A later
collection deletes it, unless a manifest names it by then. This happens after the grace period, when
every run and reader that began before is over. The same applies to parts that killed runs have
staged in the target of a `write` stage. Published files are not examined.

Files that are deleted without a mark must be older than both periods together, because a run in
progress may need them: unfinished files, failed rows, batches and texts of definitions.

Local files that arguments name are needed by the runs that began with their record. They are
deleted once their last run has begun longer ago than both periods together. The same applies to
tables in the store, which are also needed while a manifest to keep names them, and to indexes of
source files.
"""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vane_dagster.errors import StoreError
from vane_dagster.storage.batch_records import BatchFolder
from vane_dagster.storage.contents import pipeline_folders
from vane_dagster.storage.definition_texts import DEFINITIONS, file_of
from vane_dagster.storage.filesystem import TEMPORARY, FileInfo, StoragePath, in_threads
from vane_dagster.storage.manifest import ManifestName, parse_part_name
from vane_dagster.storage.publish.base import STAGED, STAGING, staged_parts
from vane_dagster.storage.quarantine import FAILED
from vane_dagster.storage.quarantine import SUFFIX as FAULTS
from vane_dagster.storage.row_records import SUFFIX as RECORDS
from vane_dagster.storage.shipped_files import FILES, RECORD, contents_of, shipped_files
from vane_dagster.storage.store import ANNOUNCED, CONDEMNED, Store
from vane_dagster.storage.stored_tables import (
    TABLES,
    files_of,
    identity_of,
    record_of,
    tables,
)


@dataclass(frozen=True)
class GcPolicy:
    """When files may be removed.

    Attributes:
        now: Unix time in seconds.
        keep: Seconds that an unreferenced part, or a manifest not in force, is kept in any case.
        grace: Seconds between the mark and the deletion; longer than any run or reader takes. Other
            files must be older than both together.
        dry_run: Whether to change nothing.
    """

    now: float
    keep: float
    grace: float
    dry_run: bool = False


@dataclass
class GcReport:
    """The garbage of one stage, as URLs and sizes in bytes.

    Attributes:
        stage: Pipeline and stage, such as "docs/embedding".
        condemned: Parts marked for deletion, which a collection after the grace period deletes.
        deleted: Parts that are no longer needed.
        manifests: Manifests that are no longer in force.
        temporaries: Unfinished files of killed processes.
        files: Local files of arguments or files of tables, and their records, that no recent run
            and no manifest to keep has needed; the texts of definitions that no manifest has; the
            failed rows of former runs.
        unreadable: Targets of `write` stages that could not be examined, and why.
    """

    stage: str
    condemned: dict[str, int] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    manifests: dict[str, int] = field(default_factory=dict)
    temporaries: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def collect(store: Store, policy: GcPolicy) -> Iterator[GcReport]:
    """Collect the garbage of every pipeline below a store's root, stage by stage.

    All pipelines are surveyed first. If a newer release has written into one of them, nothing is
    deleted in any, because its manifests may need parts of the others.
    """
    store = Store(store.root)  # a branch's fallback is not its own
    surveyed = [_survey(store, name, policy) for name in pipeline_folders(store.root)]
    stages = list(itertools.chain(*surveyed))
    named = {identity for stage in stages for identity in stage.tables}
    for stage in stages:
        yield stage.collect()
    yield from _collect_files(
        FILES, shipped_files(store.root), policy, lambda path: path.endswith(RECORD), contents_of
    )
    yield from _collect_files(
        TABLES,
        tables(store.root),
        policy,
        lambda path: record_of(path) is not None,
        files_of,
        lambda path: record_of(path) in named,
    )


def _collect_files(
    name: str,
    folder: StoragePath,
    policy: GcPolicy,
    is_record: Callable[[str], bool],
    files_of: Callable[[bytes, str], set[str]],
    is_kept: Callable[[str], bool] = lambda path: False,
) -> Iterator[GcReport]:
    """Delete the files of a folder that no recent run has needed."""
    oldest = policy.now - policy.keep - policy.grace

    def find_unused(listed: Mapping[str, FileInfo]) -> set[str]:
        unneeded = {path for path, info in listed.items() if info.modified < oldest}
        unneeded = {path for path in unneeded if not is_kept(path)}
        records = [path for path in listed if is_record(path) and path not in unneeded]
        for path, data in zip(records, in_threads(folder.read, records)):
            unneeded -= files_of(data, folder.file_url(path))
        return unneeded

    listed = folder.entries()
    if not listed:
        return
    report = GcReport(name)
    unused = find_unused(listed)
    if unused and not policy.dry_run:
        # A run may have begun since: what it needs has a new record by now.
        unused &= find_unused(folder.entries())
        folder.delete(sorted(unused))
    for path in sorted(unused):
        is_temporary = path.rpartition("/")[2].startswith(TEMPORARY)
        unneeded = report.temporaries if is_temporary else report.files
        unneeded[folder.file_url(path)] = listed[path].size
    yield report


def _survey(store: Store, pipeline: str, policy: GcPolicy) -> Collection[_StageFolders]:
    """List the stages of a pipeline, each with the manifests to keep, at one moment.

    These are the ones in force, those superseded recently, and those that one of them was made
    from.
    """
    folders = store.root.child(pipeline).folders()
    listed = (_StageFolders(store, pipeline, name, policy) for name in folders)
    stages = {stage.name: stage for stage in listed if stage.holds_any()}
    wanted = {(name, path) for name, stage in stages.items() for path in stage.current()}
    while wanted:
        places = sorted(wanted)
        opened = in_threads(lambda place: stages[place[0]].references(place[1]), places)
        wanted = set()
        for (name, path), (files, made_from) in zip(places, opened):
            stages[name].needed[path] = files
            folder = path.rpartition("/")[0]
            for upstream, text in made_from.items():
                place = f"{folder}/{text}"
                if upstream in stages and place in stages[upstream].manifests:
                    wanted.add((upstream, place))
        wanted -= {(name, path) for name, stage in stages.items() for path in stage.needed}
    return stages.values()


class _StageFolders:
    """The folders of a stage; paths are relative to `parts` and to `manifests`.

    Parts are listed by partition, because there may be more of them than fit in memory.

    Attributes:
        name: The stage.
        manifests: Its manifests, as they were listed.
        needed: The manifests to keep, each with the hashes of the names of its parts: 8 bytes a
            part.
        tables: The identities of tables that they name.
        definitions: The files with the texts of their definitions.
    """

    def __init__(self, store: Store, pipeline: str, name: str, policy: GcPolicy) -> None:
        self.name = name
        self._policy = policy
        self._report = GcReport(f"{pipeline}/{name}")
        self.needed: dict[str, array[int]] = {}
        self.tables: set[str] = set()
        self.definitions: set[str] = set()
        self._place = (pipeline, name)
        self._folder = store.root.child(pipeline, name)
        self._store = store
        self._listed = time.monotonic()
        self._partitions = self._folder.child("parts").folders()
        self.manifests = self._folder.child("manifests").entries()
        self._failed = self._folder.child(FAILED).entries()
        self._condemned = store.condemned(pipeline, name)
        self._now_condemned: dict[str, float] = {}
        self._target = store.target(pipeline, name)

    def holds_any(self) -> bool:
        """Return whether this is a stage's folder, not a wrong root or another program's folder."""
        listed = (self._partitions, self.manifests, self._failed, self._condemned, self._target)
        return any(listed)

    def references(self, path: str) -> tuple[array[int], Mapping[str, str]]:
        """Read a manifest: its part files, and the manifests that it was made from.

        Its definition and its tables are added to those of the stage. One that is gone since it was
        listed has none: a run or a collection has removed it.
        """
        folder, _, name = path.rpartition("/")
        manifest = self._store.opened_if_there(*self._place, folder, name)
        if manifest is None:
            return array("q"), {}
        files = array("q", (hash(file) for part in manifest.parts for file in part.files))
        self.tables.update(filter(None, (identity_of(file.url) for file in manifest.files)))
        self.definitions.add(file_of(manifest.definition))
        return files, manifest.upstream

    def current(self) -> Iterator[str]:
        """Yield the manifests that are in force, announced, or recently superseded."""
        by_folder: dict[str, list[tuple[ManifestName, str]]] = {}
        unfinished = set()
        for path in self.manifests:
            folder, _, name = path.rpartition("/")
            if parsed := ManifestName.parse(name):
                by_folder.setdefault(folder, []).append((parsed, path))
            elif name.startswith(ANNOUNCED):
                unfinished.add(folder)
                yield path
        for folder, manifests in by_folder.items():
            manifests.sort(key=lambda item: (item[0].sequence, item[0].plan, item[0].content))
            for (_, path), (_, successor) in itertools.pairwise(manifests):
                superseded = self.manifests[successor].modified
                if folder in unfinished or not self._is_old(superseded):
                    yield path
            yield manifests[-1][1]

    def _is_old(self, since: float) -> bool:
        return self._policy.now - since > self._policy.keep

    def _is_unused(self, since: float) -> bool:
        """Whether a file is older than all runs and readers, so that it needs no mark."""
        return self._is_old(since + self._policy.grace)

    def collect(self) -> GcReport:
        """Mark and delete parts; marked parts that are needed again are released."""
        collected = self._report
        kept: dict[str, list[array[int]]] = {}
        for path, files in self.needed.items():
            kept.setdefault(path.rpartition("/")[0], []).append(files)
        parts, manifests = self._folder.child("parts"), self._folder.child("manifests")
        unneeded = in_threads(
            lambda folder: self._unneeded(folder, kept.get(folder, ())), self._partitions
        )
        for folder, unnamed in zip(self._partitions, unneeded):
            for name, stored in unnamed.items():
                path = f"{folder}/{name}"
                self._sort(path, parts.file_url(path), stored)
        self._collect_staged()
        texts = self._folder.child(DEFINITIONS)
        unused = {n: s for n, s in texts.entries().items() if n not in self.definitions}
        for place, listed in ((texts, unused), (self._folder.child(FAILED), self._failed)):
            for name, stored in listed.items():
                if self._is_unused(stored.modified):
                    collected.files[place.file_url(name)] = stored.size
        self._collect_batches()
        for path, stored in self.manifests.items():
            name = path.rpartition("/")[2]
            if name.startswith(TEMPORARY) and self._is_unused(stored.modified):
                collected.temporaries[manifests.file_url(path)] = stored.size
            elif path not in self.needed and ManifestName.parse(name):
                collected.manifests[manifests.file_url(path)] = stored.size
        if not self._policy.dry_run:
            self._carry_out()
        return collected

    def _collect_batches(self) -> None:
        """Delete batches whose answers were stored long ago, and requests of killed runs."""
        folder = BatchFolder(self._store, *self._place)
        if not (stored := folder.path.entries()):
            return
        batches = folder.batches()
        ended = [b.name for b in batches if b.ended_at and self._is_unused(b.ended_at)]
        in_flight = [batch.name for batch in batches if batch.name not in ended]
        for name, info in stored.items():
            batch = name.partition(".")[0]
            if batch in ended or (self._is_unused(info.modified) and batch not in in_flight):
                self._report.files[folder.path.file_url(name)] = info.size

    def _unneeded(self, folder: str, kept: Iterable[array[int]]) -> dict[str, FileInfo]:
        """List the files of a partition that no manifest names."""
        named = set(itertools.chain.from_iterable(kept))
        listed = self._folder.child("parts", folder).entries()
        unnamed = {name: info for name, info in listed.items() if hash(name) not in named}
        # A run may have committed some of them since the manifests were listed.
        manifests = self._folder.child("manifests", folder).names() if unnamed else ()
        for path in {f"{folder}/{name}" for name in manifests} - self.manifests.keys():
            named.update(self.references(path)[0])
        return {name: info for name, info in unnamed.items() if hash(name) not in named}

    def _sort(self, path: str, url: str, stored: FileInfo) -> None:
        """Decide about a part that no manifest needs, under its path among the marked parts."""
        name, policy, collected = path.rpartition("/")[2], self._policy, self._report
        if not self._is_old(stored.modified):
            return
        if name.startswith(TEMPORARY):
            if self._is_unused(stored.modified):
                collected.temporaries[url] = stored.size
        elif parse_part_name(name) or name.endswith((FAULTS, RECORDS)):
            since = self._condemned.get(path)
            gone = since is not None and policy.now - since >= policy.grace
            (collected.deleted if gone else collected.condemned)[url] = stored.size
            # A deleted part stays marked until a listing shows that it is gone: a plan that
            # listed it before must not build on it.
            self._now_condemned[path] = since or policy.now + time.monotonic() - self._listed

    def _collect_staged(self) -> None:
        """Decide about the parts that are staged in the target of a `write` stage."""
        if (url := self._target) is None:
            return
        try:
            staged = staged_parts(url, self._store.root.options_for(url))
        except StoreError as error:
            self._report.unreadable[url] = str(error)
            staged_before = (path for path in self._condemned if path.startswith(f"{STAGING}/"))
            self._now_condemned |= {path: self._condemned[path] for path in staged_before}
            return
        for url, stored in staged.items():
            name = url.rpartition("/")[2].removesuffix(STAGED)
            self._sort(f"{STAGING}/{name}", url, stored)

    def _carry_out(self) -> None:
        collected, condemned = self._report, self._now_condemned
        if condemned != self._condemned:
            if condemned:
                self._folder.write(CONDEMNED, json.dumps(condemned).encode())
            else:
                self._folder.delete([CONDEMNED])
        urls = [*collected.manifests, *collected.deleted, *collected.temporaries, *collected.files]
        by_folder: dict[str, list[str]] = {}
        for url in urls:
            folder, _, name = url.rpartition("/")
            by_folder.setdefault(folder, []).append(name)
        root = self._store.root
        places = [(StoragePath(url, root.options_for(url)), own) for url, own in by_folder.items()]
        in_threads(lambda item: item[0].delete(item[1]), places)
