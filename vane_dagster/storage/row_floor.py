"""The floor of a stage's row records: rows of an earlier epoch are never found again.

A forced run raises it. So no run that comes later, in any partition, copies a row that was computed
before. A floor is a time in seconds since 1970, so that the one after a lost file is higher too.
"""

from __future__ import annotations

import json
import time

from vane_dagster.errors import StoreError
from vane_dagster.storage.codec import require_format
from vane_dagster.storage.store import Store

_FILE = "row_floor.json"
_FORMAT = 1


def read_floor(store: Store, pipeline: str, stage: str) -> int:
    """Return the floor of a stage; 0 if no run was forced.

    Args:
        store: The store.
        pipeline: The pipeline's name.
        stage: The stage's name.

    Raises:
        StoreError: If it cannot be read.
    """
    return _read(store, pipeline, stage)[0]


def raise_floor(store: Store, pipeline: str, stage: str, run_id: str) -> int:
    """Raise the floor of a stage, once for each run, and return it.

    Args:
        store: The store.
        pipeline: The pipeline's name.
        stage: The stage's name.
        run_id: The forced run.

    Raises:
        StoreError: If it cannot be read or written.
    """
    floor, raised_by = _read(store, pipeline, stage)
    if raised_by == run_id:
        return floor
    raised = max(floor + 1, int(time.time()))
    _write(store, pipeline, stage, raised, run_id)
    return raised


def inherit_floor(store: Store, pipeline: str, stage: str, former: str) -> None:
    """Give a renamed stage the floor of its former name, if that is higher.

    Args:
        store: The store.
        pipeline: The pipeline's name.
        stage: The stage's name.
        former: Its former name.

    Raises:
        StoreError: If one cannot be read or written.
    """
    floor, run_id = _read(store, pipeline, former)
    if floor > read_floor(store, pipeline, stage):
        _write(store, pipeline, stage, floor, run_id)


def _write(store: Store, pipeline: str, stage: str, floor: int, run_id: str) -> None:
    record = {"format": _FORMAT, "floor": floor, "run_id": run_id}
    store.root.child(pipeline, stage).write(_FILE, json.dumps(record).encode())


def _read(store: Store, pipeline: str, stage: str) -> tuple[int, str]:
    folder = store.root.child(pipeline, stage)
    try:
        record = json.loads(folder.read(_FILE))
        require_format(record, _FORMAT, folder.file_url(_FILE))
        return int(record["floor"]), str(record["run_id"])
    except FileNotFoundError:
        return 0, ""
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{folder.file_url(_FILE)!r} is not readable: {error}. Restore it, or delete it and "
            "then materialize the stage with force"
        ) from error
