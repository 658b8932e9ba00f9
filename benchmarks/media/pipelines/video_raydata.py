"""Video by Ray Data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray.data

from benchmarks.media.models import Yolos, video_frames


class Detections(Yolos):
    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        labels, scores, boxes = await asyncio.to_thread(self.detect, batch.pop("data"))
        yield {**batch, "labels": labels, "scores": scores, "boxes": boxes}


def frames(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make a row of each frame of a video."""
    for frame in video_frames(row["bytes"]):
        yield {"path": row["path"], **frame}


def run(source: str, out: str) -> None:
    """Detect the objects in the videos of a folder."""
    ray.data.read_binary_files(source, include_paths=True, override_num_blocks=12).flat_map(
        frames
    ).map_batches(
        Detections, batch_size=16, max_concurrency=2, compute=ray.data.ActorPoolStrategy(size=1)
    ).write_parquet(out)
