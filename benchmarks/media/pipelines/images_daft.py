"""Images by Daft."""

from __future__ import annotations

import asyncio
from typing import Any

import daft
import numpy as np

from benchmarks.media.models import ResNet


@daft.cls(max_concurrency=2)
class Labels(ResNet):
    @daft.method.batch(return_dtype=daft.DataType.int64(), batch_size=16)
    async def label(self, images: daft.Series) -> Any:
        return await asyncio.to_thread(self.classify, np.stack(images.to_pylist()))


def run(source: str, out: str) -> None:
    """Classify the images of a folder."""
    files = daft.from_glob_path(f"{source}/*.jpg")
    images = files["path"].download().decode_image(mode="RGB").resize(224, 224)
    files.select("path", Labels().label(images).alias("label")).write_parquet(out)
