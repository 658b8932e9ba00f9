"""Batches of all formats in runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata


def widths(batch: dict[str, np.ndarray], least: int) -> dict[str, Any]:
    """Numpy in, numpy out."""
    return {"width": np.linalg.norm(batch["vector"], axis=1) + least}


def described(batch: pd.DataFrame) -> pd.DataFrame:
    """Pandas in, pandas out, the rows turned round."""
    turned = batch.iloc[::-1]
    return pd.DataFrame({"id": turned["id"], "label": "row " + turned["text"]})


def even(batch: pa.Table) -> pa.Table:
    """Drops rows."""
    return batch.filter([value % 2 == 0 for value in batch["n"].to_pylist()])


class Client:
    """An API client: many rows in flight."""

    async def __call__(self, batch):
        await asyncio.sleep(0)
        return {"answer": [f"answer to {text}" for text in batch["text"].to_pylist()]}


def test_all_formats_and_both_joins_in_one_run(tmp_path: Path, local, materialize):
    ids = [f"k{n:03}" for n in range(50)]
    source = pa.table(
        {
            "id": ids,
            "n": range(50),
            "text": [f"t{n}" for n in range(50)],
            "vector": pa.array([[n, 0] for n in range(50)], pa.list_(pa.float32(), 2)),
        }
    )
    write_source(tmp_path / "src", source)
    docs = vd.Pipeline("docs", source=vd.parquet(f"{tmp_path}/src"), id="id", fragment_rows=20)
    clean = docs.project("clean", ["n", "text", "vector"], where="n <> 7")
    width = clean.map_batches(
        "width", widths, schema={"width": "DOUBLE"}, batch_format="numpy", batch_size=6,
        columns=["vector"], fn_kwargs={"least": 1},
    )  # fmt: skip
    label = clean.map_batches(
        "label", described, schema={"id": "VARCHAR", "label": "VARCHAR"}, batch_format="pandas"
    )
    evens = clean.map_batches(
        "evens", even, schema={"id": "VARCHAR", "n": "BIGINT"}, cardinality="filter"
    )
    halved = evens.project("halved", {"half": "n // 2"})
    answer = clean.map_batches("answer", Client, schema={"answer": "VARCHAR"}, batch_size=1)
    docs.join("inner", clean, width, label, halved)
    docs.join("left", clean, halved, answer, how="left")
    result = materialize(docs, local)

    inner = read_stage(tmp_path / "store", "docs", "inner").to_pylist()
    assert [row["id"] for row in inner] == ids[::2]
    assert all(row["width"] == row["n"] + 1 for row in inner)
    assert all(row["label"] == f"row t{row['n']}" for row in inner)
    assert all(row["half"] == row["n"] // 2 and row["vector"] == [row["n"], 0] for row in inner)
    left = read_stage(tmp_path / "store", "docs", "left").to_pylist()
    assert [row["n"] for row in left] == [n for n in range(50) if n != 7]
    assert all(row["half"] == (None if row["n"] % 2 else row["n"] // 2) for row in left)
    assert all(row["answer"] == f"answer to t{row['n']}" for row in left)
    assert metadata(result, "evens")["dagster/row_count"] == 25
    assert metadata(result, "answer")["batches"] == 49
