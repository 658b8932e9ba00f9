"""Encoded images in Parquet, classified by a Hugging Face `pipeline("image-classification")`."""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "images").absolute()
MODEL = os.environ.get("VANE_EXAMPLES_VISION", "google/vit-base-patch16-224")
COLORS = ["red", "blue", "darkred", "navy"]


class Recognizer:
    """Names what an image shows."""

    def __init__(self, model: str) -> None:
        from transformers import pipeline

        self.classify = pipeline("image-classification", model=model, batch_size=16)

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        from PIL import Image

        images = [Image.open(io.BytesIO(image)) for image in batch["image"].to_pylist()]
        best = [found[0] for found in self.classify(images, top_k=1)]
        return {"label": [b["label"] for b in best], "score": [b["score"] for b in best]}


@dg.asset
def images() -> None:
    """The input: four PNG images, each of one color."""
    from PIL import Image

    encoded = []
    for color in COLORS:
        file = io.BytesIO()
        Image.new("RGB", (64, 48), color).save(file, "png")
        encoded.append(file.getvalue())
    (ROOT / "images").mkdir(parents=True, exist_ok=True)
    table = pa.table({"name": COLORS, "image": encoded})
    pq.write_table(table, ROOT / "images" / "all.parquet")


gallery = vd.Pipeline("gallery", source=vd.parquet(str(ROOT / "images"), asset=images), id="name")
gallery.map_batches(
    "recognized",
    functools.partial(Recognizer, model=MODEL),
    schema={"label": "VARCHAR", "score": "DOUBLE"},
    batch_size=64,
).write("published", str(ROOT / "out"))

assets = [images, gallery.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("gallery_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['name']} looks like {row['label']}")


if __name__ == "__main__":
    main()
