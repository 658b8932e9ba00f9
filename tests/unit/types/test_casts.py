"""Casts of tables and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.in_process import compute
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store
from vane_dagster.types.casts import cast_table

CALL = pa.struct([("name", pa.string()), ("result", pa.null())])
"""As of messages with calls of tools, of which none has a result."""
CALLS = [[{"name": f"call {n}", "result": None} for n in range(count)] for count in (3, 0, 4)]
COLUMNS = {
    "calls": pa.array(CALLS, pa.list_(CALL)),
    "nothings": pa.array([[None] * 3, None, [None] * 2], pa.list_(pa.null())),
    "nested": pa.array([{"calls": each} for each in CALLS], pa.struct([("calls", pa.list_(CALL))])),
    "map": pa.array([[(c["name"], None) for c in e] for e in CALLS], pa.map_("string", pa.null())),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_lists_with_nulls_in_each_element_are_kept(column: str) -> None:
    values = COLUMNS[column]
    table = pa.table({"other": pa.array([1, 2, 3], pa.int8()), "x": values})
    schema = pa.schema([("x", values.type), ("other", pa.int64())])
    found = cast_table(table, schema)
    found.validate(full=True)
    assert (found.schema, found.to_pylist()) == (schema, table.select(schema.names).to_pylist())


def echo(batch: pa.Table) -> dict[str, Any]:
    return {"again": batch["calls"]}


def test_a_pipeline_passes_them_on(tmp_path: Path) -> None:
    write_source(tmp_path / "src", {"id": [1, 2, 3], "n": pa.array([1, 2, 3]), **COLUMNS})
    store = Store(Location(str(tmp_path / "store")))
    for number in (1, 2):
        docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
        both = docs.project("plain", {"m": f"n * {number}"}, include_columns=True).map_batches(
            "echo",
            echo,
            columns=["calls"],
            schema=pa.schema([("again", COLUMNS["calls"].type)]),
            include_columns=True,
        )
        both.write("out", str(tmp_path / "out"), target_file_bytes=1 << 20)
        compute(docs, store)  # the second time the rows of `echo` are copied
        wanted = pa.table({**COLUMNS, "again": COLUMNS["calls"]}).to_pylist()
        published = pq.ParquetFile(*(tmp_path / "out").glob("*.parquet")).read()
        for rows in (read_stage(tmp_path / "store", "docs", "echo"), published):
            assert rows["m"].to_pylist() == [number * n for n in (1, 2, 3)]
            assert rows.select([*wanted[0]]).to_pylist() == wanted
