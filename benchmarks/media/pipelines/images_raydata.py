"""Images by Ray Data."""

from __future__ import annotations

from typing import Any

import ray.data

from benchmarks.media.models import ResNet


class Labels(ResNet):
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"path": batch["path"], "label": self.classify(batch["image"])}


def run(source: str, out: str) -> None:
    """Classify the images of a folder."""
    ray.data.read_images(
        source, size=(224, 224), mode="RGB", include_paths=True, override_num_blocks=16
    ).map_batches(
        Labels, batch_size=16, num_cpus=0.5, compute=ray.data.ActorPoolStrategy(size=2)
    ).write_parquet(out)
