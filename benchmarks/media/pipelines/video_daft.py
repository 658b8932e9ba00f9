"""Video by Daft."""

from __future__ import annotations

import asyncio
from typing import Any

import daft
import numpy as np
from daft import DataType

from benchmarks.media.models import Yolos, video_frames

PICTURE = DataType.tensor(DataType.uint8(), (224, 224, 3))
FRAME = DataType.struct({"frame_index": DataType.int64(), "data": PICTURE})
FOUND = DataType.struct(
    {
        "labels": DataType.list(DataType.int64()),
        "scores": DataType.list(DataType.float32()),
        "boxes": DataType.list(DataType.float32()),
    }
)


@daft.func(return_dtype=DataType.list(FRAME))
def frames(content: bytes) -> list[dict[str, Any]]:
    """Return the frames of a video."""
    return list(video_frames(content))


@daft.cls(max_concurrency=2)
class Detections(Yolos):
    @daft.method.batch(return_dtype=FOUND, unnest=True, batch_size=16)
    async def found(self, pictures: daft.Series) -> list[dict[str, Any]]:
        columns = await asyncio.to_thread(self.detect, np.stack(pictures.to_pylist()))
        return [dict(zip(("labels", "scores", "boxes"), row)) for row in zip(*columns)]


def run(source: str, out: str) -> None:
    """Detect the objects in the videos of a folder."""
    files = daft.from_glob_path(f"{source}/*.mp4")
    rows = files.select("path", frames(files["path"].download()).alias("frame")).explode("frame")
    rows = rows.select("path", rows["frame"].unnest())
    rows.select("path", "frame_index", Detections().found(rows["data"])).write_parquet(out)
