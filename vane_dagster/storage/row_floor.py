"""The floor of a stage's row records: rows of an earlier epoch are never found again.

A forced run raises it. So no run that comes later, in any partition, copies a row that was computed
before.
"""

from __future__ import annotations

import json

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
    record = {"floor": floor + 1, "run_id": run_id}
    store.root.child(pipeline, stage).write(_FILE, json.dumps(record).encode())
    return floor + 1


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
            f"{folder.file_url(_FILE)!r} is not readable: {error}. Restore it, or materialize the "
            "stage with force after you have deleted it"
        ) from error
