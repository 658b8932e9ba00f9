"""Adoptions: that a definition of a stage makes the same rows as the one of its stored results.

``<root>/<pipeline>/adopted-<stage>-<definition>.json``, with the definition that was adopted. A run
of that definition plans, keys and records its work by the components of the stored one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vane_dagster.storage.codec import Codec, read_file
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
            f"95% confidence at most {min(1.0, 3 / self.rows):.2g} of all rows differ, if those "
            "that differ are spread over the partitions"
        )


_CODEC = Codec(
    Adoption, read={"components": read_components}, write={"components": component_records}
)


def adoptions(store: Store, pipeline: str) -> Callable[[str, str], Adoption | None]:
    """Return a function of stage and definition that finds an adoption, from one listing."""
    folder = store.root.child(pipeline)
    names = set(folder.names())

    def find(stage: str, definition: str) -> Adoption | None:
        name = _name(stage, definition)
        fix = "Delete it, and the next run computes the stage again"
        return read_file(folder, name, _CODEC.load, fix) if name in names else None

    return find


def keep_adoption(store: Store, pipeline: str, adoption: Adoption) -> None:
    """Record an adoption; it takes effect with the next plan."""
    text = json.dumps(_CODEC.record(adoption)).encode()
    store.root.child(pipeline).write(_name(adoption.stage, adoption.definition), text)


def _name(stage: str, definition: str) -> str:
    return f"adopted-{stage}-{definition}.json"
