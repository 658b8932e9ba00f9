"""Images by Ray Data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray.data

from benchmarks.media.models import ResNet


class Labels(ResNet):
    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        labels = await asyncio.to_thread(self.classify, batch["image"])
        yield {"path": batch["path"], "label": labels}


def run(source: str, out: str) -> None:
    """Classify the images of a folder."""
    ray.data.read_images(
        source, size=(224, 224), mode="RGB", include_paths=True, override_num_blocks=16
    ).map_batches(
        Labels, batch_size=16, max_concurrency=2, compute=ray.data.ActorPoolStrategy(size=1)
    ).write_parquet(out)
