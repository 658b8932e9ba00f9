"""Checks that ids are unique. Sorting is the fastest way.

Integers are sorted as they are. Many texts are sorted by their hashes: if all hashes differ, so do
the texts; if two hashes are equal, the texts are counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import names
from vane_dagster.worker.database import connection

_HASHED_FROM = 16_384

Sorted = np.ndarray[Any, Any]


def repeated_or_null(ids: pa.ChunkedArray) -> str | None:
    """Describe why ids are not unique and non-null; None if they are."""
    if ids.null_count:
        return f"{ids.null_count} null ids"
    if len(ids) < 2 or is_increasing(ids) or is_distinct(ids):
        return None
    counts = ids.value_counts()
    repeated = [c["values"].as_py() for c in counts if c["counts"].as_py() > 1]
    return f"{len(repeated)} ids more than once: {names(repeated)}"


def is_increasing(ids: pa.ChunkedArray) -> bool:
    """Return whether each id is larger than the previous one, which implies that ids are unique."""
    return bool(pc.all(pc.less(ids.slice(0, len(ids) - 1), ids.slice(1))).as_py())


def is_distinct(ids: pa.ChunkedArray) -> bool:
    """Return whether ids, none of which is null, are unique."""
    prints = _sorted_prints(ids)
    if prints is not None and (prints[1:] != prints[:-1]).all():
        return True
    return bool(pc.count_distinct(ids).as_py() == len(ids))


def _sorted_prints(ids: pa.ChunkedArray) -> Sorted | None:
    """Return sorted numbers that differ only if the ids do; None if counting ids is as fast."""
    if pa.types.is_integer(ids.type):
        return np.sort(ids.to_numpy())
    if len(ids) < _HASHED_FROM:
        return None
    rows = connection().from_arrow(pa.table({"id": ids}))
    hashed = rows.project("hash(id) AS hashed").to_arrow_table().column("hashed")
    return np.sort(hashed.to_numpy())
