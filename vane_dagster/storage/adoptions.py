"""Adoptions: records that two definitions of a stage make the same rows.

An adoption is the file ``<root>/<pipeline>/adopted-<stage>-<definition>-<stored>-<time>.json``. To
undo it, a second file is written whose name begins with ``undone``. Neither is ever deleted, and
each is one write, so a killed process leaves no adoption half in force.

Definitions that are connected by adoptions form a class. A part with rows of its own definition
only is looked up under each definition of the class. The key of a part that may also have copied
rows includes the adoptions in force. So after an adoption is undone, each part is used only for the
definitions that it is valid for.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vane_dagster._texts import count, listed
from vane_dagster.storage.codec import Codec, read_file
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Component
from vane_dagster.storage.store import Store, copy_missing

_UNCOMPARED = "without a comparison"
_NAME = re.compile(r"(adopted|undone)-(.+)-([0-9a-f]{40})-([0-9a-f]{40})-(\d{19,})\.json")


@dataclass(frozen=True)
class Adoption:
    """The comparison after which a definition was adopted.

    Attributes:
        stage: The stage.
        definition: The definition that was adopted.
        stored: The definition of the stored results.
        components: What the adopted definition consists of.
        stored_components: What the stored definition consists of.
        changes: What the two definitions differ in.
        rows: Number of rows that were drawn, computed again and came out the same; 0 for an
            adoption without a comparison.
        is_all: Whether these were all stored rows.
        partitions: Number of partitions with these rows.
        tolerance: The largest difference of floating-point numbers that counted as the same.
        seed: The rows were chosen by it.
        user: Who adopted it.
        at: Unix time in nanoseconds.
    """

    stage: str
    definition: str
    stored: str
    components: Sequence[Component]
    stored_components: Sequence[Component]
    changes: Sequence[str]
    rows: int
    is_all: bool
    partitions: int
    tolerance: float
    seed: int
    user: str
    at: int

    @property
    def pair(self) -> tuple[str, str]:
        """The two definitions."""
        return self.definition, self.stored

    @property
    def name(self) -> str:
        """The rest of the file's name, after what it says."""
        return f"-{self.stage}-{self.definition}-{self.stored}-{self.at:019d}.json"

    @property
    def since(self) -> str:
        """That it is in effect, in a line with the stage."""
        return f"{self.stage}: {self.summary}"

    @property
    def summary(self) -> str:
        """What was adopted, when, by whom, and after how many rows."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.at / 1e9))
        how = f"after comparing {count(self.rows, 'row')}" if self.rows else _UNCOMPARED
        return f"{listed(self.changes)}, adopted on {day} by {self.user} {how}"

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.stage}: adopted {listed(self.changes)} {_UNCOMPARED}"
        at_most = f"at most {min(1.0, 3 / self.rows):.2g} of all rows differ"
        within = f" within {self.tolerance:g}" if self.tolerance else ""
        bound = "no stored row differs" if self.is_all else f"with 95% confidence {at_most}"
        return (
            f"{self.stage}: adopted {listed(self.changes)}: {count(self.rows, 'row')} of "
            f"{count(self.partitions, 'partition')} came out the same{within}, so {bound}"
        )


_CODEC = Codec(Adoption)


@dataclass(frozen=True)
class Adoptions:
    """The adoptions of a stage.

    Attributes:
        live: Those in force, the oldest first.
        undone: The others.
    """

    live: Sequence[Adoption] = ()
    undone: Sequence[Adoption] = ()

    @property
    def undone_names(self) -> list[str]:
        """The names of those that were undone."""
        return [each.name for each in self.undone]

    def of(self, definition: str) -> Sequence[Adoption]:
        """Return those in force that join a definition with others, the latest last."""
        equal = self.equals(definition)
        return [each for each in self.live if each.definition in equal]

    def equals(self, definition: str) -> Sequence[str]:
        """Return the class of a definition, itself first."""
        return joined(definition, [each.pair for each in self.live])

    def names(self, definition: str, copies_rows: bool) -> Sequence[tuple[str, ...]]:
        """Return what the keys of parts are made of that are true for a definition.

        The first is for new parts. If they may have rows of other definitions, it has the
        adoptions in force, and parts from before the latest of these are found too.
        """
        tails = [each.name for each in self.live] if copies_rows else []
        own, *others = self.equals(definition)
        return [
            (each, *tails[:count]) for each in (own, *others) for count in range(len(tails), -1, -1)
        ]

    def equal_rows(
        self, own: str, row_definition: Callable[[Sequence[Component]], str]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Return the row definitions whose rows are true, and those to look for them in.

        The latter were once joined, so manifests of one may have rows of another.
        """

        def pairs(adopted: Iterable[Adoption]) -> list[tuple[str, str]]:
            sides = [(each.components, each.stored_components) for each in adopted]
            return [(row_definition(now), row_definition(then)) for now, then in sides]

        live = pairs(self.live)
        searched = joined(own, [*live, *pairs(self.undone)])
        return frozenset(joined(own, live)), frozenset(searched)


def latest(lines: Sequence[str]) -> list[str]:
    """Return a line about adoptions, given a line for each: the last, and how many others."""
    return [listed(lines[::-1], 1, "; ")] if lines else []


def joined(start: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return what is connected with the start, which is first."""
    connected, left = [start], list(pairs)
    for each in connected:
        for pair in left:
            if each in pair:
                connected += [other for other in pair if other not in connected]
    return connected


def adoptions(store: Store, pipeline: str) -> defaultdict[str, Adoptions]:
    """Return the adoptions of a pipeline's stages; of most there are none."""
    folders = [each.root.child(pipeline) for each in reversed(store.layers)]  # a branch's last
    files = {name: folder for folder in folders for name in folder.names()}
    parsed = [match for name in files if (match := _NAME.fullmatch(name))]
    undone = {match[0] for match in parsed if match[1] == "undone"}
    by_stage: dict[str, tuple[list[Adoption], list[Adoption]]] = {}
    for match in sorted(parsed, key=lambda match: (int(match[5]), match[0])):
        if match[1] == "adopted" and (adoption := _read(files[match[0]], match[0])):
            live, split = by_stage.setdefault(match[2], ([], []))
            (split if f"undone{adoption.name}" in undone else live).append(adoption)
    return defaultdict(Adoptions, {stage: Adoptions(*each) for stage, each in by_stage.items()})


def _read(folder: StoragePath, name: str) -> Adoption | None:
    fix = "Delete it, and the next run computes the stage again"
    return read_file(folder, name, _CODEC.load, fix)


def keep_adoption(store: Store, pipeline: str, adoption: Adoption) -> None:
    """Record an adoption; it takes effect with the next plan."""
    store.root.child(pipeline).write(f"adopted{adoption.name}", _CODEC.dumps(adoption))


def undo_adoptions(store: Store, pipeline: str, known: Sequence[Adoption], definition: str) -> None:
    """Split a class of definitions; see `Adoptions.of`. Its own adoptions are undone last.

    So the class is found again if the process is killed before.
    """
    folder = store.root.child(pipeline)
    for each in sorted(known, key=lambda each: definition in each.pair):
        folder.write(f"undone{each.name}", json.dumps({"at": time.time()}).encode())  # for people


def copy_adoptions(source: Store, target: Store, pipeline: str) -> None:
    """Take over the adoptions of another store, and that some were undone there."""
    known, other = source.root.child(pipeline), target.root.child(pipeline)
    copy_missing(known, other, _NAME.fullmatch)
