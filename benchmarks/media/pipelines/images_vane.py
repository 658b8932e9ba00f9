"""Images by vane_dagster."""

from __future__ import annotations

import asyncio
from typing import Any

import vane_dagster as vd
from benchmarks.media.models import ResNet


class Labels(ResNet):
    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"label": await asyncio.to_thread(self.classify, batch["image"])}


def pipeline(source: str, days: Any) -> vd.Pipeline:
    """Classify the images of a folder a day."""
    photos = vd.images(f"{source}/{{partition_key}}/*.jpg", size=(224, 224))
    images = vd.Pipeline("images", source=photos, partitions_def=days)
    types = {"label": "BIGINT"}
    images.map_batches(
        "labels",
        Labels,
        schema=types,
        batch_format="numpy",
        batch_size=16,
        concurrency=vd.Workers(max_concurrency=2),
    )
    return images
