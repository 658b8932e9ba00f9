"""Pipelines over rows in memory and Hugging Face datasets: what is computed again, and traces."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

os.environ["HF_HUB_OFFLINE"] = "1"  # the library reads it when it is imported
import datasets

import vane_dagster as vd
from support.data import read_stage
from support.results import metadata

ROWS = 5_000


def rows(*added: int, first: str = "text 0") -> pa.Table:
    ids = [*range(ROWS), *added]
    return pa.table({"id": ids, "text": [first, *(f"text {n}" for n in ids[1:])]})


def shout(batch: pa.Table) -> dict[str, Any]:
    return {"loud": [text.upper() for text in batch["text"].to_pylist()]}


def docs(source: Any) -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=source, id="id", fragment_rows=300)
    kept = pipeline.project("kept", ["text"], where="id <> 17")
    kept.map_batches("loud", shout, schema={"loud": "VARCHAR"})
    return pipeline


def test_an_added_row_recomputes_the_last_block(tmp_path, compute, materialize):
    store = str(tmp_path / "store")

    def source(table: pa.Table, place: str) -> Any:
        if place == "one":
            return vd.table(table)
        datasets.Dataset(table).save_to_disk(str(tmp_path / place))
        return vd.huggingface(str(tmp_path / place))

    first = metadata(materialize(docs(source(rows(), "one")), compute), "loud")
    assert first["fragments_computed"] == first["fragments"] > 5
    found = read_stage(tmp_path / "store", "docs", "loud")
    assert found["loud"].to_pylist() == [f"TEXT {n}" for n in range(ROWS) if n != 17]
    # The same rows elsewhere, or of another kind, cost nothing.
    again = metadata(materialize(docs(source(rows(), "two")), compute), "loud")
    assert again["fragments_computed"] == 0
    step = vd.trace("docs/loud", 4_000, store=store).steps[0]
    assert (step.stage, step.row) == ("docs/source", 4_000)
    assert step.url.startswith("table://")
    dropped = vd.trace("docs/source", 17, forward=True, store=store)
    assert (dropped.steps[0].row, "filtered" in dropped.missing["docs/kept"]) == (17, True)
    other = vd.trace(docs(vd.table({"id": [1], "text": ["x"]}))["loud"], 3, store=store)
    assert other.steps[0].row == 3

    changed = source(rows(ROWS, first="other"), "three")
    after = metadata(materialize(docs(changed), compute), "loud")
    # The first block and the last one, of 1,024 rows, are cut into four fragments each.
    assert after["fragments_computed"] == 8 < after["fragments"]
    found = read_stage(tmp_path / "store", "docs", "loud")
    assert (found["loud"][0].as_py(), found["id"].to_pylist()[-1]) == ("OTHER", ROWS)
