"""Files with different columns in one partition: runs, what is computed again, and traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata
from vane_dagster.sources.parquet import ParquetSource

NARROW = pa.table({"id": pa.array([1, 2, 3], pa.int32()), "n": pa.array([1, 2, 3], pa.int32())})
WIDE = pa.table({"n": [1 << 40, 5], "id": [1 << 41, 6], "extra": ["e", None]})


def types(batch: pa.Table) -> Iterator[pa.Table]:
    """Returns the types that the function was given, and the values."""
    extra = batch["extra"] if "extra" in batch.column_names else pa.nulls(len(batch), pa.string())
    kind = pa.array([str(batch["n"].type)] * len(batch))
    yield pa.table({"id": batch["id"], "type": kind, "n": batch["n"].cast("int64"), "x": extra})


def halves(batch: pa.Table) -> dict[str, Any]:
    return {"half": [n / 2 for n in batch["n"].to_pylist()]}


def docs(source: ParquetSource) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=source, id="id")
    docs.map_batches("direct", types, schema={"type": "VARCHAR", "n": "BIGINT", "x": "VARCHAR"})
    kept = docs.project("kept", {"n": "n", "twice": "n * 2"}, where="n <> 2")
    kept.map_batches("inferred", halves, schema="infer")
    return docs


def rows(store: Path, stage: str) -> list[dict[str, Any]]:
    read = read_stage(store, "docs", stage)
    return sorted(read.to_pylist(), key=lambda row: row["id"])


def test_a_wider_file_is_added(tmp_path, local, materialize):
    src, store = tmp_path / "src", tmp_path / "store"
    source = vd.parquet(str(src), small_files="group")
    write_source(src, NARROW, "a.parquet", row_group_size=2)
    materialize(docs(source), local)
    assert [row["type"] for row in rows(store, "direct")] == ["int32"] * 3
    assert read_stage(store, "docs", "kept").schema.field("n").type == pa.int32()

    write_source(src, WIDE, "b.parquet")
    materialize(docs(source), local)
    found = rows(store, "direct")
    assert [row["type"] for row in found] == ["int64"] * 5
    assert [row["n"] for row in found] == [1, 2, 3, 5, 1 << 40]
    assert [row["x"] for row in found] == [None, None, None, None, "e"]
    kept = read_stage(store, "docs", "kept")
    assert kept.schema.field("n").type == kept.schema.field("id").type == pa.int64()
    assert [row["twice"] for row in rows(store, "kept")] == [2, 6, 10, 1 << 41]
    assert [row["half"] for row in rows(store, "inferred")] == [0.5, 1.5, 2.5, float(1 << 39)]

    again = materialize(docs(source), local)
    assert metadata(again, "direct")["fragments_computed"] == 0
    for id, name, row in ((3, "a.parquet", 2), (1 << 41, "b.parquet", 0)):
        step = vd.trace("docs/inferred", id, store=str(store)).steps[0]
        assert (step.url, step.row) == (f"file://{src}/{name}", row)
