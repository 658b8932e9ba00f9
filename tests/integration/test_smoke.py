"""The complete data flow, on both compute resources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.dataset as ds

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import metadata


class Scale:
    """Multiplies a number."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch):
        return {"id": batch["id"], "scaled": np.asarray(batch["n"]) * self.factor}


def length(batch):
    """Length of a text."""
    return {"length": [len(text) for text in batch["text"].to_pylist()]}


def make(tmp_path: Path) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    clean = docs.project("clean", {"text": "trim(text)", "n": "n"}, where="n % 2 = 0")
    lengths = clean.map_batches("lengths", length, schema={"length": "BIGINT"}, columns=["text"])
    scaled = clean.map_batches(
        "scaled",
        Scale,
        schema={"id": "BIGINT", "scaled": "BIGINT"},
        batch_size=8,
        concurrency=2,
        fn_constructor_kwargs={"factor": 3},
    )
    joined = docs.join("joined", clean, lengths, scaled)
    joined.write("published", str(tmp_path / "out"))
    return docs


def test_rows_go_from_source_to_published_folder(tmp_path, compute, materialize):
    numbers = range(100)
    texts = [f" t{n} " for n in numbers]
    write_source(tmp_path / "src", {"id": numbers, "text": texts, "n": numbers})

    result = materialize(make(tmp_path), compute)

    published = ds.dataset(tmp_path / "out", format="parquet").to_table().sort_by("id")
    expected = [n for n in numbers if n % 2 == 0]
    assert published["id"].to_pylist() == expected
    assert published["text"].to_pylist() == [f"t{n}" for n in expected]
    assert published["length"].to_pylist() == [len(f"t{n}") for n in expected]
    assert published["scaled"].to_pylist() == [3 * n for n in expected]
    assert metadata(result, "scaled")["dagster/row_count"] == 50
    assert read_stage(tmp_path / "store", "docs", "joined").num_rows == 50

    again = materialize(make(tmp_path), compute)
    assert metadata(again, "scaled")["fragments_computed"] == 0
    assert metadata(again, "published")["fragments_reused"] == 1
