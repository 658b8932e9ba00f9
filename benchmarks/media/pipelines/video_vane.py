"""Video by vane_dagster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import vane_dagster as vd
from benchmarks.media.models import Yolos, video_frames


class Detections(Yolos):
    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = await asyncio.to_thread(self.detect, batch["data"])
        return dict(zip(("labels", "scores", "boxes"), found))


def frames(file: vd.File) -> Iterator[dict[str, Any]]:
    """Make a row of each frame of a video."""
    return video_frames(file.read())


def pipeline(source: str, days: Any) -> vd.Pipeline:
    """Detect the objects in the videos of a folder a day."""
    files = vd.files(f"{source}/{{partition_key}}/*.mp4")
    video = vd.Pipeline("video", source=files, partitions_def=days)
    types = {"frame_index": "BIGINT", "data": vd.tensor("uint8", (224, 224, 3))}
    video.flat_map("frames", frames, id="id", schema=types).map_batches(
        "detections",
        Detections,
        schema={"labels": "BIGINT[3]", "scores": "FLOAT[3]", "boxes": "FLOAT[12]"},
        include_columns=["frame_index"],
        batch_format="numpy",
        batch_size=16,
        concurrency=vd.Workers(max_concurrency=2),
    )
    return video
