"""Checks that ids are unique."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._texts import count
from vane_dagster.errors import names


def repeated_or_null(ids: pa.ChunkedArray) -> str | None:
    """Describe why ids are not unique and non-null; None if they are."""
    if ids.null_count:
        return count(ids.null_count, "null id")
    increases = pc.all(pc.less(ids.slice(0, max(0, len(ids) - 1)), ids.slice(1))).as_py()
    if increases or len(ids.unique()) == len(ids):
        return None
    counts = ids.value_counts()
    repeated = counts.field(0).filter(pc.greater(counts.field(1), 1)).to_pylist()
    return f"{count(len(repeated), 'id')} more than once: {names(repeated)}"
