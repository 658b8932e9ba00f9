"""Audio by vane_dagster."""

from __future__ import annotations

from typing import Any

import vane_dagster as vd
from benchmarks.media.models import Whisper, wav_samples


class Transcripts(Whisper):
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"text": self.transcribe([wav_samples(vd.File(p).read()) for p in batch["path"]])}


def definitions(source: str, out: str) -> Any:
    """Transcribe the clips of a folder."""
    import dagster as dg

    clips = vd.files(f"{source}/{{partition_key}}/*.wav")
    days = dg.StaticPartitionsDefinition(["p0", "p1"])
    audio = vd.Pipeline("audio", source=clips, partitions_def=days)
    types = {"text": "VARCHAR"}
    audio.map_batches(
        "text", Transcripts, schema=types, batch_format="numpy", batch_size=8, concurrency=2
    )
    resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=out)}
    return dg.Definitions(assets=[audio.build_assets()], resources=resources)
