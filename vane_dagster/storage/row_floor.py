"""The epoch of a stage's row records, which a forced run raises.

It is the floor of the partitions that the run commits: no later run copies rows of an earlier epoch
into them. Other partitions keep their floors. An epoch is a time in seconds since 1970, so that the
one after a lost file is later too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from vane_dagster.storage.codec import Codec, read_file
from vane_dagster.storage.store import Store

_FILE = "row_floor.json"


def read_epoch(store: Store, pipeline: str, stage: str) -> int:
    """Return the epoch of a stage; 0 if no run was forced."""
    return _read(store, pipeline, stage).floor


def raise_epoch(store: Store, pipeline: str, stage: str, run_id: str) -> int:
    """Raise the epoch of a stage, once for each run, and return it."""
    current = _read(store, pipeline, stage)
    if current.run_id == run_id:
        return current.floor
    raised = max(current.floor + 1, int(time.time()))
    store.root.child(pipeline, stage).write(_FILE, _CODEC.dumps(_Epoch(raised, run_id)))
    return raised


def copy_epoch(source: Store, target: Store, pipeline: str, stage: str) -> None:
    """Copy the epoch of a stage into another store, unless that one has a later epoch."""
    current = _read(source, pipeline, stage)
    if current.floor > _read(target, pipeline, stage).floor:
        target.root.child(pipeline, stage).write(_FILE, _CODEC.dumps(current))


@dataclass(frozen=True)
class _Epoch:
    """An epoch, which stores record as the floor that it once was, and the run that raised it."""

    floor: int = 0
    run_id: str = ""


_CODEC = Codec(_Epoch)


def _read(store: Store, pipeline: str, stage: str) -> _Epoch:
    fix = "Restore it, or delete it and then materialize the stage with force"
    places = (each.root.child(pipeline, stage) for each in store.layers)
    epochs = (read_file(place, _FILE, _CODEC.load, fix) for place in places)
    return max((each for each in epochs if each), key=lambda each: each.floor, default=_Epoch())
