"""Sentiments by a Hugging Face `pipeline("text-classification")`.

The pipeline is constructed once in each worker. It makes its own batches.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "sentiments").absolute()
MODEL = os.environ.get(
    "VANE_EXAMPLES_SENTIMENT", "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
)
TEXTS = ["I love this kettle", "It broke after a day", "Great value", "I want my money back"]


class Sentiment:
    """Tells praise from complaint."""

    def __init__(self, model: str) -> None:
        from transformers import pipeline

        self.classify = pipeline("text-classification", model=model, batch_size=32)

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        found = self.classify(batch["text"].to_pylist(), truncation=True)
        return {"label": [f["label"] for f in found], "score": [f["score"] for f in found]}


@dg.asset
def reviews() -> None:
    """The input: four reviews."""
    (ROOT / "reviews").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(4), "text": TEXTS}), ROOT / "reviews" / "all.parquet")


source = vd.parquet(str(ROOT / "reviews"), asset=reviews)
sentiments = vd.Pipeline("sentiments", source=source, id="id")
sentiments.map_batches(
    "rated",
    functools.partial(Sentiment, model=MODEL),
    schema={"label": "VARCHAR", "score": "DOUBLE"},
    include_columns=["text"],
).write("published", str(ROOT / "out"))

assets = [reviews, sentiments.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("sentiments_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['label']} ({row['score']:.2f}): {row['text']}")


if __name__ == "__main__":
    main()
