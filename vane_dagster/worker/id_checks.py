"""Checks that ids are unique: sorting their hashes is the fastest way.

If all hashes differ, so do the ids; if two are equal, the ids are counted.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import names
from vane_dagster.worker.database import connection


def repeated_or_null(ids: pa.ChunkedArray) -> str | None:
    """Describe why ids are not unique and non-null; None if they are."""
    if ids.null_count:
        return f"{ids.null_count} null ids"
    if len(ids) < 2 or _are_increasing(ids) or _have_different_hashes(ids):
        return None
    counts = ids.value_counts()
    repeated = counts.field(0).filter(pc.greater(counts.field(1), 1)).to_pylist()
    return f"{len(repeated)} ids more than once: {names(repeated)}" if repeated else None


def _are_increasing(ids: pa.ChunkedArray) -> bool:
    return bool(pc.all(pc.less(ids.slice(0, len(ids) - 1), ids.slice(1))).as_py())


def _have_different_hashes(ids: pa.ChunkedArray) -> bool:
    rows = connection().from_arrow(pa.table({"id": ids})).project("hash(id) AS hashed")
    prints = np.sort(rows.to_arrow_table().column("hashed").to_numpy())
    return bool((prints[1:] != prints[:-1]).all())
