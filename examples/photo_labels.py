"""Labels of photos by a ResNet of transformers, from image files; a broken file fails its row."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import dagster as dg
import numpy as np
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "photos").absolute()
MODEL = os.environ.get("VANE_EXAMPLES_RESNET", "microsoft/resnet-18")
COLORS = ["red", "blue", "darkred", "navy"]


class Labeler:
    """Names what an image shows."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import ResNetForImageClassification

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = ResNetForImageClassification.from_pretrained(model).to(self.device).eval()

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[str] | np.ndarray]:
        import torch

        images = torch.from_numpy(batch["image"]).to(self.device)  # (rows, 224, 224, 3) uint8
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).to(self.device)
        pixels = ((images / 255 - mean) / std).permute(0, 3, 1, 2)
        with torch.inference_mode():
            best = self.model(pixels).logits.softmax(dim=1).max(dim=1)
        names = self.model.config.id2label
        return {"label": [names[int(i)] for i in best.indices], "score": best.values.cpu().numpy()}


@dg.asset
def photos() -> None:
    """The input: four photos, each of one color, and a file that is none."""
    from PIL import Image

    (ROOT / "jpg").mkdir(parents=True, exist_ok=True)
    for color in COLORS:
        Image.new("RGB", (500, 375), color).save(ROOT / "jpg" / f"{color}.jpg")
    (ROOT / "jpg" / "broken.jpg").write_bytes(b"no image")


album = vd.Pipeline(
    "album", source=vd.images(str(ROOT / "jpg" / "*.jpg"), size=(224, 224), asset=photos)
)
labels = album.map_batches(
    "labels",
    functools.partial(Labeler, model=MODEL),
    schema={"label": "VARCHAR", "score": "FLOAT"},
    batch_format="numpy",
    batch_size=32,
)
labels.write("published", str(ROOT / "out"))

assets = [photos, album.build_assets()]
store = vd.FragmentStore(root=str(ROOT / "store"))
resources = {"compute": vd.RayCompute(), "store": store}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("album_pipeline"):
        print(done.asset_key.path[-1], "computed:", done.metadata["rows_computed"].value)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{Path(row['path']).name}: {row['label']}")
    for row in vd.quarantine(labels, store=store).to_pylist():
        print(f"{Path(row['id']).name}: {row['message']}")


if __name__ == "__main__":
    main()
