"""The floor of a stage's row records: rows of an earlier epoch are never found again.

A forced run raises it. So no run that comes later, in any partition, copies a row that was computed
before. A floor is a time in seconds since 1970, so that the one after a lost file is higher too.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

from vane_dagster.storage.codec import Codec, read_file
from vane_dagster.storage.store import Store

_FILE = "row_floor.json"


def read_floor(store: Store, pipeline: str, stage: str) -> int:
    """Return the floor of a stage; 0 if no run was forced."""
    return _read(store, pipeline, stage).floor


def raise_floor(store: Store, pipeline: str, stage: str, run_id: str) -> int:
    """Raise the floor of a stage, once for each run, and return it."""
    found = _read(store, pipeline, stage)
    if found.run_id == run_id:
        return found.floor
    raised = max(found.floor + 1, int(time.time()))
    for former in found.former:
        known = _read(store, pipeline, former)
        _write(store, pipeline, former, replace(known, floor=max(raised, known.floor)))
    _write(store, pipeline, stage, replace(found, floor=raised, run_id=run_id))
    return raised


def inherit_floor(store: Store, pipeline: str, stage: str, former: str) -> None:
    """Give a renamed stage the floor of its former name, if that is higher.

    Runs that force it raise the floor of its former names too, since it may get one of them back.
    """
    found, before = (_read(store, pipeline, name) for name in (stage, former))
    names = tuple(sorted({*found.former, *before.former, former} - {stage}))
    inherited = replace(found, floor=max(found.floor, before.floor), former=names)
    if inherited != found:
        _write(store, pipeline, stage, inherited)


@dataclass(frozen=True)
class _Floor:
    """A floor, the run that has raised it, and the stage's former names."""

    floor: int = 0
    run_id: str = ""
    former: tuple[str, ...] = ()


_CODEC = Codec(_Floor, read={"former": tuple})


def _write(store: Store, pipeline: str, stage: str, floor: _Floor) -> None:
    record = json.dumps(_CODEC.record(floor))
    store.root.child(pipeline, stage).write(_FILE, record.encode())


def _read(store: Store, pipeline: str, stage: str) -> _Floor:
    fix = "Restore it, or delete it and then materialize the stage with force"
    return read_file(store.root.child(pipeline, stage), _FILE, _CODEC.load, fix) or _Floor()
