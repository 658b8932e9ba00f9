"""Runs that read no more of a source than their stages need, with its types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage
from support.results import failure, metadata
from support.typed_source import (
    ROWS,
    source,  # noqa: F401  # fixtures
)


def double(batch: pa.Table) -> dict[str, Any]:
    return {"double": [2 * n for n in batch["n"].to_pylist()]}


def test_columns_that_no_stage_needs_are_not_read(source, tmp_path, local, materialize):
    """By a project, by a map of the source, and below them; fragments are ranges of row groups."""
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=ROWS // 4)
    projected = docs.project("projected", {"sum": "n + m"}, where="m % 2 = 0")
    mapped = docs.map_batches("mapped", double, schema={"double": "BIGINT"}, columns=["n"])
    docs.join("joined", projected, mapped)

    result = materialize(docs, local)

    assert metadata(result, "mapped")["fragments_computed"] == 4
    joined = read_stage(tmp_path / "store", "docs", "joined")
    assert joined["id"].to_pylist() == list(range(0, ROWS, 2))
    assert joined["sum"].equals(joined["double"])

    whole = vd.Pipeline("whole", source=source, id="id")
    whole.map_batches("mapped", double, schema={"double": "BIGINT"})
    result = materialize(whole, local, raises=False)
    assert "a.parquet' cannot be read" in failure(result), "so the proof above can fail"
