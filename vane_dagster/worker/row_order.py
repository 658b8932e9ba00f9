"""Rows of a fragment in the order in which models are best asked, and back in their own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.pipeline.options import RowOrder

_PLACE = "__place"


def arrange(rows: pa.Table, order: RowOrder, shares: int) -> tuple[pa.Table, tuple[int, ...]]:
    """Rows in an order, those of a group in the same share.

    A group is in the same share in every fragment, as long as there are so many.

    Args:
        rows: The rows of a fragment.
        order: The order.
        shares: How many workers there are.

    Returns:
        The rows with the place that each had, and where the rows of each share end.
    """
    keys = order.keys(rows)
    share = [zlib.crc32(group.encode()) % shares for group, _ in keys]
    places = sorted(range(len(keys)), key=lambda i: (share[i], keys[i]))
    column = pa.array(places, pa.int64())
    ends = np.cumsum(np.bincount(share, minlength=shares)).tolist()
    return rows.take(column).append_column(_PLACE, column), tuple(ends)


def restore(pieces: Sequence[pa.Table], given: pa.Table, id: str) -> pa.Table:
    """What was made of rows that were arranged, in the order that these had before.

    Args:
        pieces: What was made of them; it may be less.
        given: The rows as they were arranged.
        id: Their id, and that of what was made of them.
    """
    made = pa.concat_tables(pieces)
    found = pc.index_in(made.column(id), value_set=given.column(id).combine_chunks())
    places = given.column(_PLACE).take(found.combine_chunks()).to_numpy()
    return made.take(pa.array(np.argsort(places, kind="stable")))
