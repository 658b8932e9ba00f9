"""Video by Daft."""

from __future__ import annotations

from typing import Any

import daft
import numpy as np
from daft import DataType

from benchmarks.media.models import Yolos

FOUND = DataType.struct(
    {
        "labels": DataType.list(DataType.int64()),
        "scores": DataType.list(DataType.float32()),
        "boxes": DataType.list(DataType.float32()),
    }
)


@daft.cls
class Detections(Yolos):
    @daft.method.batch(return_dtype=FOUND, unnest=True, batch_size=16)
    def found(self, frames: daft.Series) -> list[dict[str, Any]]:
        columns = self.detect(np.stack(frames.to_pylist()))
        return [dict(zip(("labels", "scores", "boxes"), row)) for row in zip(*columns)]


def run(source: str, out: str) -> None:
    """Detect the objects in the videos of a folder."""
    frames = daft.read_video_frames(f"{source}/*.mp4", image_height=224, image_width=224)
    found = Detections().found(frames["data"])
    frames.select("path", "frame_index", found).write_parquet(out)
