"""Audio by vane_dagster."""

from __future__ import annotations

import asyncio
from typing import Any

import vane_dagster as vd
from benchmarks.media.models import Whisper, wav_samples


class Transcripts(Whisper):
    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        waves = [wav_samples(vd.File(path).read()) for path in batch["path"]]
        return {"text": await asyncio.to_thread(self.transcribe, waves)}


def pipeline(source: str, days: Any) -> vd.Pipeline:
    """Transcribe the clips of a folder a day."""
    clips = vd.files(f"{source}/{{partition_key}}/*.wav")
    audio = vd.Pipeline("audio", source=clips, partitions_def=days)
    types = {"text": "VARCHAR"}
    audio.map_batches(
        "text",
        Transcripts,
        schema=types,
        batch_format="numpy",
        batch_size=8,
        concurrency=vd.Workers(max_concurrency=2),
    )
    return audio
