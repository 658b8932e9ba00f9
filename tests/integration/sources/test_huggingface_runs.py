"""Pipelines over Hugging Face datasets: what workers read, and what is computed again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # the library reads it when it is imported
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

import vane_dagster as vd  # noqa: E402 - after the variable
from support.data import read_stage  # noqa: E402 - after the variable
from support.results import metadata  # noqa: E402 - after the variable

COUNT = 5_000


def shout(batch: pa.Table) -> dict[str, Any]:
    return {"loud": [text.upper() for text in batch["text"].to_pylist()]}


def docs(source: Any, **given: Any) -> vd.Pipeline:
    pipeline = vd.Pipeline(
        "docs", source=vd.huggingface(source, **given), id="id", fragment_rows=300
    )
    kept = pipeline.project("kept", ["text"], where="id <> 17")
    kept.map_batches("loud", shout, schema={"loud": "VARCHAR"})
    return pipeline


def saved(folder: Path, count: int = COUNT, first: str = "text 0") -> str:
    texts = [first, *(f"text {n}" for n in range(1, count))]
    made = datasets.Dataset.from_dict({"id": range(count), "text": texts})
    made.save_to_disk(str(folder))
    return str(folder)


def test_a_run_reads_the_arrow_files(tmp_path, compute, materialize):
    path = saved(tmp_path / "one")
    first = metadata(materialize(docs(path), compute), "loud")
    assert first["fragments_computed"] == first["fragments"] > 5
    rows = read_stage(tmp_path / "store", "docs", "loud")
    assert rows["loud"].to_pylist() == [f"TEXT {n}" for n in range(COUNT) if n != 17]
    assert not (tmp_path / "store" / "~tables" / "made").exists()
    store = str(tmp_path / "store")
    assert vd.trace("docs/loud", 1_500, store=store).steps[0].row == 1_500

    # The same rows elsewhere, copied, or in another order of files cost nothing.
    again = docs(saved(tmp_path / "two"), copy=True)
    assert metadata(materialize(again, compute), "loud")["fragments_computed"] == 0
    changed = docs(saved(tmp_path / "three", COUNT + 1, "other"))
    after = metadata(materialize(changed, compute), "loud")
    # The first block and the last one, of 1,024 rows, are cut into four fragments each.
    assert after["fragments_computed"] == 8 < after["fragments"]
    assert read_stage(tmp_path / "store", "docs", "loud")["loud"][0].as_py() == "OTHER"
