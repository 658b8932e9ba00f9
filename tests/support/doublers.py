"""Stages that double a column."""

from __future__ import annotations

import os

import pyarrow as pa

from vane_dagster import _failpoints


def double(batch: pa.Table) -> pa.Table:
    return pa.table({"y": [2 * x for x in batch["x"].to_pylist()]})


class Doubler:
    """Like `double`, as a class; reports whether its process has a fault plan."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        known = [str(_failpoints.VARIABLE in os.environ)] * batch.num_rows
        return double(batch).append_column("known", pa.array(known))
