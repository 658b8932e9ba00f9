"""Promotion: the manifests of a branch, and the parts that they name, become those of its fallback.

A partition of a stage is promoted only if the manifest that the branch started from is still in
force. Everything is checked before anything is written, and again when all parts are copied; each
manifest is written after those of its upstream stages. So a promotion that was killed can be run
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from vane_dagster._texts import in_partition
from vane_dagster.errors import StoreError, names
from vane_dagster.storage.adoptions import copy_adoptions
from vane_dagster.storage.definition_texts import DEFINITIONS, file_of
from vane_dagster.storage.filesystem import in_threads
from vane_dagster.storage.manifest import Manifest, ManifestName, PartInfo
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.row_floor import copy_epoch
from vane_dagster.storage.schema_pins import SCHEMAS
from vane_dagster.storage.store import BRANCH, Store, copy_files, copy_missing
from vane_dagster.storage.stored_tables import borrow, identity_of

_SETTINGS = ("fragments.json", "types-")
"""What the files of a pipeline begin with that say what its first run determined."""

Place = tuple[str, str | None]
"""A stage and the key of a partition."""


@dataclass(frozen=True)
class Promoted:
    """A partition of a stage that was promoted.

    Attributes:
        stage: The stage.
        partition: The partition's key.
        parts: The parts that were copied; none if the other store has them.
        was_in_force: Whether the other store had the same results in force, for example after a
            promotion.
    """

    stage: str
    partition: str | None
    parts: Sequence[PartInfo]
    was_in_force: bool = False


class Promotion:
    """The promotion of a pipeline.

    Stages that publish are not promoted: a run with the other store publishes them there.

    Args:
        branch: The branch.
        target: The store that it started from.
        pipeline: The pipeline's name.

    Raises:
        StoreError: If the branch has nothing to promote, what it started from is not in force, or
            it is a branch of another store.
    """

    def __init__(self, branch: Store, target: Store, pipeline: str) -> None:
        # What a branch reads from its fallback is there already.
        self._branch, self._target = Store(branch.root), Store(target.root)
        self._pipeline = pipeline
        other = self._branch.branch_of
        if other is not None and other.rstrip("/") != target.root.url.rstrip("/"):
            raise StoreError(
                f"{branch.root.url!r} is a branch of {other!r}; expected that store as the target, "
                f"got {target.root.url!r}. If the store has moved, correct {BRANCH} in the branch"
            )
        self._promoted = self._in_force()
        self._before = self._present()
        self._refuse(
            self._superseded(),
            f"Materialize it in a new branch, with its own root and {target.root.url!r} as the "
            "fallback, and promote that branch",
        )
        self._refuse(
            self._of_own_assets(),
            "Promote that asset, then materialize this stage in the target store",
        )

    def carry_out(self) -> Iterator[Promoted]:
        """Copy parts and commit manifests."""
        self._refuse(
            self._stale(),
            "Materialize it in the branch first. If the pipeline no longer has the stage, delete "
            "its folder in the branch",
        )
        copied = {
            place: self._copy_parts(manifest)
            for place, (name, manifest) in self._promoted.items()
            if _version(self._before.get(place)) != name.version
        }
        now = self._present()
        every = {**self._before, **now}
        changed = [self._label(p) for p in every if now.get(p) != self._before.get(p)]
        self._refuse(changed, "Another run committed it meanwhile. Run the promotion again")
        self._copy_records()
        committed: dict[Place, str] = {}
        for place, (_, manifest) in self._promoted.items():
            before = self._before.get(place)
            if place not in copied:
                committed[place] = str(before)
                yield Promoted(*place, (), was_in_force=True)
                continue
            if self._target.latest_own(self._pipeline, *place) != before:
                raise StoreError(
                    f"{self._label(place)}: another run committed it during the promotion. "
                    "Everything promoted so far is complete; run the promotion again"
                )
            above = self._read_by(place, manifest)
            upstream = {each[0]: committed.get(each) or str(self._before[each]) for each in above}
            made = replace(manifest, upstream=upstream, branched_from="")
            committed[place] = str(self._target.commit(made))
            self._copy_parts(manifest)  # what a collection has deleted before the commit
            yield Promoted(*place, copied[place])

    def _refuse(self, problems: Iterable[str], fix: str) -> None:
        """Raise StoreError if there are problems; nothing is written yet."""
        if listed := [*problems]:
            more = f"; and {len(listed) - 3} more" * (len(listed) > 3)
            raise StoreError(
                f"{self._branch.root.url!r} was not promoted into {self._target.root.url!r}: "
                f"{'; '.join(listed[:3])}{more}. {fix}"
            )

    def _in_force(self) -> Mapping[Place, tuple[ManifestName, Manifest]]:
        """Read the manifests of the branch that do not publish, upstream stages first."""
        manifests: dict[Place, tuple[ManifestName, Manifest]] = {}
        committed = self._branch.stages(self._pipeline)
        for stage in committed:
            latest = self._branch.latest_of_all(self._pipeline, stage)
            given = [(self._pipeline, stage, folder, str(name)) for folder, name in latest.items()]
            read = in_threads(lambda place: self._branch.opened(*place), given)
            for name, manifest in zip(latest.values(), read):
                if manifest.kind != "write":
                    manifests[stage, manifest.partition] = name, manifest
        if not manifests:
            raise StoreError(
                f"{self._branch.root.url!r} has committed no partition of pipeline "
                f"{self._pipeline!r} to promote; committed there: {names(committed)}. Give the "
                "root of a branch, and materialize there first"
            )
        above = {
            place: self._read_by(place, manifest) for place, (_, manifest) in manifests.items()
        }
        return {p: manifests[p] for p in TopologicalSorter(above).static_order() if p in manifests}

    def _read_by(self, place: Place, manifest: Manifest) -> Sequence[Place]:
        """Return what a partition was made from."""
        return [(stage, place[1]) for stage in manifest.upstream]

    def _present(self) -> Mapping[Place, ManifestName]:
        """Return the manifests in force of the other store, of what is promoted and read by it."""
        above = (self._read_by(place, manifest) for place, (_, manifest) in self._promoted.items())
        places = {*self._promoted, *itertools.chain(*above)}
        names: dict[Place, ManifestName] = {}
        for stage in {stage for stage, _ in places}:
            keys = [key for name, key in places if name == stage]
            latest = self._target.latest(self._pipeline, stage, keys)
            names |= {(stage, key): name for key, name in latest.items()}
        return names

    def _superseded(self) -> Iterator[str]:
        """Yield what has another version in force than the one that the branch started from."""
        for place, (name, manifest) in self._promoted.items():
            now = self._before.get(place)
            start = ManifestName.parse(manifest.branched_from)
            # Other runs may have come back to it; a promotion that was killed has put ours there.
            if _version(now) not in (_version(start), name.version):
                known = manifest.branched_from or "nothing"
                yield f"{self._label(place)}: the branch began at {known}, in force is {now}"

    def _of_own_assets(self) -> Iterator[str]:
        """Yield what was made from other assets of the branch."""
        root = self._branch.root
        below = f"{root.fs.unstrip_protocol(root.path).rstrip('/')}/"
        for place, (_, manifest) in self._promoted.items():
            if any(file.url.startswith(below) for file in manifest.files):
                yield f"{self._label(place)}: its source is an asset committed in the branch"

    def _stale(self) -> Iterator[str]:
        """Yield what was made from another version of an upstream stage than will be in force."""
        for (own, key), (_, manifest) in self._promoted.items():
            for stage, known in manifest.upstream.items():
                place = (stage, key)
                now = (
                    self._promoted[place][0] if place in self._promoted else self._before.get(place)
                )
                # A branch that has come back to a version has it under another number.
                if now is None or now.version != _version(ManifestName.parse(known)):
                    where = self._branch if place in self._promoted else self._target
                    yield (
                        f"{self._label((own, key))}: it was made from {known} of {stage!r}, but "
                        f"{where.root.url!r} has {now}"
                    )

    def _label(self, place: Place) -> str:
        stage, key = place
        return f"{self._pipeline}/{stage}{in_partition(key)}"

    def _copy_parts(self, manifest: Manifest) -> Sequence[PartInfo]:
        """Copy the parts that the other store lacks or is about to delete."""
        source = self._branch.parts_of(manifest)
        target = self._target.parts(self._pipeline, manifest.stage, manifest.partition)
        present, folder = target.names(), partition_folder(manifest.partition)
        leaving = self._target.condemned(self._pipeline, manifest.stage)
        lacking = {
            part.name: part
            for part in manifest.parts
            if any(name not in present or f"{folder}/{name}" in leaving for name in part.files)
        }
        try:
            in_threads(lambda part: copy_files(source, target, part.files), lacking.values())
        except FileNotFoundError as error:
            raise StoreError(
                f"{self._label((manifest.stage, manifest.partition))}: a part is missing in the "
                f"branch: {error}. Materialize it again there with force"
            ) from error
        return tuple(lacking.values())

    def _copy_records(self) -> None:
        """Copy what plans need besides manifests."""
        known, other = (each.root.child(self._pipeline) for each in (self._branch, self._target))
        copy_missing(known, other, lambda name: name.startswith(_SETTINGS))
        copy_adoptions(self._branch, self._target, self._pipeline)
        urls = {file.url for _, manifest in self._promoted.values() for file in manifest.files}
        for identity in filter(None, map(identity_of, urls)):
            borrow(Store(self._target.root, fallback=self._branch), identity)
        for stage in {stage for stage, _ in self._promoted}:
            copy_epoch(self._branch, self._target, self._pipeline, stage)
            made = {m.definition for (s, _), (_, m) in self._promoted.items() if s == stage}
            texts = {file_of(definition) for definition in made}
            source, target = (
                each.root.child(self._pipeline, stage) for each in (self._branch, self._target)
            )
            copy_missing(source.child(SCHEMAS), target.child(SCHEMAS), bool)
            copy_missing(source.child(DEFINITIONS), target.child(DEFINITIONS), texts.__contains__)


def _version(name: ManifestName | None) -> tuple[str, str, str] | None:
    return None if name is None else name.version
