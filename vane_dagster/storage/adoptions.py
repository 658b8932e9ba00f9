"""Adoptions: that a definition of a stage makes the same rows as the one of its stored results.

``<root>/<pipeline>/adopted-<stage>-<definition>.json``, with the definition that was adopted. A run
of that definition plans, keys and records its work by the components of the stored one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vane_dagster.storage.codec import Codec
from vane_dagster.storage.manifest import Component, component_records, read_components
from vane_dagster.storage.store import Store


@dataclass(frozen=True)
class Adoption:
    """The comparison after which a definition was adopted.

    Attributes:
        stage: The stage.
        definition: The definition that was adopted.
        stored: The definition of the stored results.
        components: What the stored definition consists of.
        changes: What the two definitions differ in.
        rows: Number of rows that were computed again and came out the same.
        partitions: Number of partitions with these rows.
        tolerance: The largest difference of floating-point numbers that counted as the same.
        seed: The rows were chosen by it.
        user: Who adopted it.
        at: Unix time in seconds.
    """

    stage: str
    definition: str
    stored: str
    components: Sequence[Component]
    changes: Sequence[str]
    rows: int
    partitions: int
    tolerance: float
    seed: int
    user: str
    at: float

    @property
    def since(self) -> str:
        """That it is in effect, in a line."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.at))
        return (
            f"{self.stage}: {', '.join(self.changes)}, adopted on {day} by {self.user} after "
            f"comparing {self.rows:,} rows"
        )

    def __str__(self) -> str:
        return (
            f"{self.stage}: adopted {', '.join(self.changes)}: {self.rows:,} rows of "
            f"{self.partitions:,} partitions came out the same within {self.tolerance:g}, so with "
            f"95% confidence at most {min(1.0, 3 / self.rows):.2g} of all rows differ"
        )


_CODEC = Codec(
    Adoption, read={"components": read_components}, write={"components": component_records}
)


@dataclass(frozen=True)
class Adoptions:
    """The adoptions of a pipeline, and those that were undone, from one listing.

    Attributes:
        names: The files in the pipeline's folder.
    """

    _store: Store
    _pipeline: str
    names: Collection[str]

    def of(self, stage: str, definition: str) -> Adoption | None:
        """Return how a definition was adopted; None if it was not, or no longer is."""
        name = _name("adopted", stage, definition)
        fix = "Delete it, and the next run computes the stage again"
        if name not in self.names:
            return None
        return self._store.read_record([self._pipeline], name, _CODEC.load, fix)

    def split(
        self, stage: str, definition: str, components: Sequence[Component]
    ) -> tuple[Component, ...]:
        """Return a definition's components, with one more if an adoption of it was undone.

        What was computed while two definitions counted as one is then found by neither.
        """
        beginning = _name("undone", stage, definition, suffix="")
        undone = sorted(name for name in self.names if name.startswith(beginning))
        return (*components, *(Component("adoption", "undone", name) for name in undone))


def adoptions(store: Store, pipeline: str) -> Adoptions:
    """List the adoptions of a pipeline; what a branch undoes is undone there alone."""
    found: set[str] = set()
    for each in reversed(store.layers):
        own = set(each.root.child(pipeline).names())
        undone = {name.rpartition("-")[0] for name in own - found if name.startswith("undone-")}
        found -= {f"adopted{name.removeprefix('undone')}.json" for name in undone}
        found |= own
    return Adoptions(store, pipeline, frozenset(found))


def keep_adoption(store: Store, pipeline: str, adoption: Adoption) -> None:
    """Record an adoption; it takes effect with the next plan."""
    name = _name("adopted", adoption.stage, adoption.definition)
    store.root.child(pipeline).write(name, json.dumps(_CODEC.record(adoption)).encode())


def undo_adoption(store: Store, pipeline: str, adoption: Adoption) -> None:
    """Split two definitions that count as one; see `Adoptions.split`."""
    folder, moment = store.root.child(pipeline), f"-{time.time_ns()}.json"
    for definition in (adoption.definition, adoption.stored):
        folder.write(_name("undone", adoption.stage, definition, moment), b"{}")
    folder.delete([_name("adopted", adoption.stage, adoption.definition)])


def copy_adoptions(source: Store, target: Store, pipeline: str) -> None:
    """Take over the adoptions of another store, and those that were undone there."""
    folder, other = target.root.child(pipeline), source.root.child(pipeline)
    for name in sorted(other.names().keys() - folder.names().keys(), reverse=True):
        if name.startswith("undone-"):  # before those that were adopted again
            folder.delete([f"adopted{name.rpartition('-')[0].removeprefix('undone')}.json"])
        if name.startswith(("adopted-", "undone-")):
            folder.create(name, other.read(name))


def _name(kind: str, stage: str, definition: str, suffix: str = ".json") -> str:
    return f"{kind}-{stage}-{definition}{suffix}"
