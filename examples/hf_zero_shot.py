"""Topics that the model was not trained on, by `pipeline("zero-shot-classification")`.

The topics are arguments of each call, so another list does not reload the model.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "topics").absolute()
MODEL = os.environ.get("VANE_EXAMPLES_NLI", "cross-encoder/nli-deberta-v3-small")
TEXTS = ["The parcel never came", "My card was charged twice", "Where is my parcel"]


class Topics:
    """Finds the topic of a message."""

    def __init__(self, model: str) -> None:
        from transformers import pipeline

        self.classify = pipeline("zero-shot-classification", model=model, batch_size=16)

    def __call__(self, batch: pa.Table, topics: Sequence[str]) -> dict[str, Any]:
        found = self.classify(batch["text"].to_pylist(), candidate_labels=list(topics))
        return {"topic": [f["labels"][0] for f in found], "sure": [f["scores"][0] for f in found]}


@dg.asset
def messages() -> None:
    """The input: three messages."""
    (ROOT / "messages").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(3), "text": TEXTS}), ROOT / "messages" / "all.parquet")


source = vd.parquet(str(ROOT / "messages"), asset=messages)
topics = vd.Pipeline("topics", source=source, id="id")
topics.map_batches(
    "sorted",
    functools.partial(Topics, model=MODEL),
    schema={"topic": "VARCHAR", "sure": "DOUBLE"},
    include_columns=["text"],
    fn_kwargs={"topics": ["delivery", "payment"]},
).write("published", str(ROOT / "out"))

assets = [messages, topics.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("topics_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['topic']}: {row['text']}")


if __name__ == "__main__":
    main()
