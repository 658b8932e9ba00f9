"""Images by vane_dagster."""

from __future__ import annotations

from typing import Any

import vane_dagster as vd
from benchmarks.media.models import ResNet


class Labels(ResNet):
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"label": self.classify(batch["image"])}


def definitions(source: str, out: str) -> Any:
    """Classify the images of a folder."""
    import dagster as dg

    photos = vd.images(f"{source}/{{partition_key}}/*.jpg", size=(224, 224))
    days = dg.StaticPartitionsDefinition(["p0", "p1"])
    images = vd.Pipeline("images", source=photos, partitions_def=days)
    types = {"label": "BIGINT"}
    images.map_batches(
        "labels", Labels, schema=types, batch_format="numpy", batch_size=16, concurrency=2
    )
    resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=out)}
    return dg.Definitions(assets=[images.build_assets()], resources=resources)
