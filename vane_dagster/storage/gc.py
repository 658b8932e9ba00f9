"""Garbage: what no manifest in force needs any more, removed so that nobody misses it.

A part goes in two steps. A first collection condemns it, and from then on no plan builds on it. A
later one, when every run and reader that may have begun before is over, deletes it, unless a
manifest names it by then. So do the parts that killed runs have staged in the target of a `write`
stage; what is published there is not looked at.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vane_dagster.errors import StoreError
from vane_dagster.storage.filesystem import TEMPORARY, Location, Stored
from vane_dagster.storage.manifest import Manifest, ManifestName, parse_part_name
from vane_dagster.storage.publish.base import STAGING
from vane_dagster.storage.publish.registry import publisher_class
from vane_dagster.storage.quarantine import SUFFIX as FAULTS
from vane_dagster.storage.reader import options_for
from vane_dagster.storage.store import ANNOUNCED, CONDEMNED, Store

_READERS = 16
_LOOKS = 3

_Needed = dict[str, frozenset[str]]


@dataclass(frozen=True)
class Terms:
    """When something may go.

    Attributes:
        now: Unix time in seconds.
        keep: Seconds that a part nobody names, or a manifest not in force, is kept in any case.
        grace: Seconds between condemning and deleting, longer than any run or reader goes on.
        dry_run: Whether to change nothing.
    """

    now: float
    keep: float
    grace: float
    dry_run: bool = False


@dataclass
class Collected:
    """What was found in one stage, as URLs and sizes in bytes.

    Attributes:
        stage: Pipeline and stage, as "docs/embedding".
        condemned: Parts that the next collection after the grace period may delete.
        deleted: Parts that nobody needs any more.
        manifests: Manifests that are not in force any more.
        temporaries: What killed processes were writing.
        unreadable: Targets of `write` stages that could not be looked at, and why.
    """

    stage: str
    condemned: dict[str, int] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    manifests: dict[str, int] = field(default_factory=dict)
    temporaries: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def collect(store: Store, terms: Terms) -> Iterator[Collected]:
    """Collects the garbage of every pipeline below a store's root, stage by stage.

    All pipelines are surveyed first: where a newer release has written into one of them, nothing is
    deleted in any, as what it has written may need parts of the others.

    Raises:
        NewerFormatError: If a newer release has written a manifest that is to be kept.
        StoreError: If the store cannot be listed or changed, or a manifest cannot be read.
    """
    surveyed = [_survey(store, pipeline, terms) for pipeline in store.root.folders()]
    for stage, needed in itertools.chain(*surveyed):
        yield stage.collect(needed, terms)


class _ChangedError(Exception):
    """A manifest that was listed is gone: a run or another collection works on the same stage."""


def _survey(store: Store, pipeline: str, terms: Terms) -> list[tuple[_Stage, _Needed]]:
    """The stages of a pipeline, each with the manifests to keep, at one moment.

    Raises:
        StoreError: If they change again and again while they are looked at.
    """
    for _ in range(_LOOKS):
        folders = store.root.child(pipeline).folders()
        stages = [s for s in (_Stage(store, pipeline, name) for name in folders) if s.holds_any()]
        try:
            needed = _needed(stages, terms)
        except _ChangedError:
            continue
        return [(stage, needed[stage.name]) for stage in stages]
    raise StoreError(
        f"pipeline {pipeline!r} changes while its garbage is collected, {_LOOKS} times in a row. "
        "Collect again when fewer runs commit"
    )


def _needed(stages: list[_Stage], terms: Terms) -> dict[str, _Needed]:
    """The manifests to keep, by stage and path, with the names of their parts.

    They are those in force, those superseded of late, and those that one of them was made from.
    """
    by_name = {stage.name: stage for stage in stages}
    needed: dict[str, _Needed] = {stage.name: {} for stage in stages}
    wanted = {(stage.name, path) for stage in stages for path in stage.current(terms)}
    with ThreadPoolExecutor(max_workers=_READERS) as threads:
        while wanted:
            places = sorted(wanted)
            opened = threads.map(lambda place: by_name[place[0]].open(place[1]), places)
            wanted = set()
            for (name, path), manifest in zip(places, opened):
                files = (file for part in manifest.parts for file in (part.name, part.faults))
                needed[name][path] = frozenset(files)
                folder = path.rpartition("/")[0]
                for upstream, text in manifest.upstream.items():
                    place = f"{folder}/{text}"
                    if upstream in by_name and place in by_name[upstream].manifests:
                        wanted.add((upstream, place))
            wanted -= {(name, path) for name, paths in needed.items() for path in paths}
    return needed


class _Stage:
    """A stage's folders as they are listed; paths are relative to `parts` and to `manifests`."""

    def __init__(self, store: Store, pipeline: str, name: str) -> None:
        self.name = name
        self._folder = store.root.child(pipeline, name)
        self._store = store
        self._label = f"{pipeline}/{name}"
        # Parts first: a part that is listed is named by a manifest that is listed after it, or by
        # none yet.
        self._listed = time.monotonic()
        self._parts = self._folder.child("parts").entries()
        self.manifests = self._folder.child("manifests").entries()
        self._condemned = store.condemned(pipeline, name)
        self._target = store.target(pipeline, name)

    def holds_any(self) -> bool:
        """Whether it is a stage's folder: that of a wrong root or of another program is not."""
        return bool(self._parts or self.manifests or self._condemned or self._target)

    def open(self, path: str) -> Manifest:
        """Reads a manifest."""
        folder, _, name = path.rpartition("/")
        try:
            return self._store.opened(self._folder.child("manifests", folder), name)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _ChangedError from error
            raise

    def current(self, terms: Terms) -> Iterator[str]:
        """The manifests in force, announced, or superseded of late."""
        by_folder: dict[str, list[tuple[ManifestName, str]]] = {}
        unfinished = set()
        for path in self.manifests:
            folder, _, name = path.rpartition("/")
            if parsed := ManifestName.parse(name):
                by_folder.setdefault(folder, []).append((parsed, path))
            elif name.startswith(ANNOUNCED):
                unfinished.add(folder)
                yield path
        for folder, found in by_folder.items():
            found.sort(key=lambda item: (item[0].sequence, item[0].plan, item[0].content))
            for (_, path), (_, successor) in itertools.pairwise(found):
                superseded = self.manifests[successor].modified
                if folder in unfinished or terms.now - superseded <= terms.keep:
                    yield path
            yield found[-1][1]

    def collect(self, needed: _Needed, terms: Terms) -> Collected:
        """Condemns and deletes; what was condemned and is needed again is pardoned."""
        found = Collected(self._label)
        kept = {
            f"{path.rpartition('/')[0]}/{name}" for path, names in needed.items() for name in names
        }
        condemned: dict[str, float] = {}
        parts, manifests = self._folder.child("parts"), self._folder.child("manifests")
        for path, stored in self._parts.items():
            if path not in kept:
                self._sort(path, parts.file_url(path), stored, terms, found, condemned)
        self._collect_staged(terms, found, condemned)
        for path, stored in self.manifests.items():
            name = path.rpartition("/")[2]
            if name.startswith(TEMPORARY) and terms.now - stored.modified > terms.keep:
                found.temporaries[manifests.file_url(path)] = stored.size
            elif path not in needed and ManifestName.parse(name):
                found.manifests[manifests.file_url(path)] = stored.size
        if not terms.dry_run:
            self._carry_out(found, condemned)
        return found

    def _sort(
        self,
        path: str,
        url: str,
        stored: Stored,
        terms: Terms,
        found: Collected,
        condemned: dict[str, float],
    ) -> None:
        """Decides about a part that no manifest needs, under its name among the condemned."""
        name = path.rpartition("/")[2]
        if terms.now - stored.modified <= terms.keep:
            return
        if name.startswith(TEMPORARY):
            found.temporaries[url] = stored.size
        elif parse_part_name(name) or name.endswith(FAULTS):
            since = self._condemned.get(path)
            gone = since is not None and terms.now - since >= terms.grace
            (found.deleted if gone else found.condemned)[url] = stored.size
            # What is deleted stays condemned until it is seen to be gone: a plan that lists it
            # meanwhile must not build on it.
            condemned[path] = since or terms.now + time.monotonic() - self._listed

    def _collect_staged(self, terms: Terms, found: Collected, condemned: dict[str, float]) -> None:
        """Goes over what is staged in the target of a `write` stage."""
        if self._target is None:
            return
        url, format = self._target
        try:
            options = options_for(self._store, url)
            staged = publisher_class(format).staged_parts(url, options)
        except StoreError as error:
            found.unreadable[url] = str(error)
            below = f"{STAGING}/"
            condemned |= {p: t for p, t in self._condemned.items() if p.startswith(below)}
            return
        for url, stored in staged.items():
            path = f"{STAGING}/{url.rpartition('/')[2]}"
            self._sort(path, url, stored, terms, found, condemned)

    def _carry_out(self, found: Collected, condemned: Mapping[str, float]) -> None:
        if condemned != self._condemned:
            if condemned:
                self._folder.write(CONDEMNED, json.dumps(dict(condemned)).encode())
            else:
                self._folder.delete([CONDEMNED])
        urls = [*found.manifests, *found.deleted, *found.temporaries]
        by_folder: dict[str, list[str]] = {}
        for url in urls:
            folder, _, name = url.rpartition("/")
            by_folder.setdefault(folder, []).append(name)
        with ThreadPoolExecutor(max_workers=_READERS) as threads:
            deletions = threads.map(
                lambda item: self._delete(found, item[0], item[1]), by_folder.items()
            )
            list(deletions)

    def _delete(self, found: Collected, folder: str, names: list[str]) -> None:
        """Deletes files; a target that refuses stops nothing."""
        try:
            Location(folder, options_for(self._store, folder)).delete(names)
        except StoreError as error:
            if f"/{STAGING}" not in folder:
                raise
            found.unreadable[folder] = str(error)
            for name in names:
                found.deleted.pop(f"{folder}/{name}", None)
                found.temporaries.pop(f"{folder}/{name}", None)
