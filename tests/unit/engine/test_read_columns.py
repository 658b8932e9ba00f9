"""Runs that read no more of a source than their stages need."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.in_process import committed, compute
from support.typed_source import (
    ROWS,
    source,  # noqa: F401  # fixtures
)
from vane_dagster.errors import SourceError

REUSE = vd.Reuse(version="1")


def double(batch: pa.Table) -> dict[str, Any]:
    return {"double": [2 * n for n in batch["n"].to_pylist()]}


@pytest.mark.parametrize("source", ["several row groups"], indirect=True)
def test_columns_that_no_stage_needs_are_not_read(source, store):
    """By a project, by a map of the source, and below them; fragments are ranges of row groups."""
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=ROWS // 4)
    projected = docs.project("projected", {"sum": "n + m"}, where="m % 2 = 0")
    mapped = docs.map_batches(
        "mapped", double, schema={"double": "BIGINT"}, columns=["n"], reuse=REUSE
    )
    both = docs.join("joined", projected, mapped)
    both.project("differing", ["sum"], where="sum <> double")
    events = compute(docs, store)
    (differing,), (joined,) = committed(events, "differing"), committed(events, "joined")
    assert (joined.manifest.rows, differing.manifest.rows) == (ROWS // 2, 0)

    whole = vd.Pipeline("whole", source=source, id="id")
    whole.map_batches("mapped", double, schema={"double": "BIGINT"}, reuse=REUSE)
    with pytest.raises(SourceError, match=r"a\.parquet' cannot be read"):  # so the proof can fail
        compute(whole, store)
