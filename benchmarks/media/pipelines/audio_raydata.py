"""Audio by Ray Data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray.data

from benchmarks.media.models import Whisper, wav_samples


class Transcripts(Whisper):
    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        waves = [wav_samples(content) for content in batch["bytes"]]
        yield {"path": batch["path"], "text": await asyncio.to_thread(self.transcribe, waves)}


def run(source: str, out: str) -> None:
    """Transcribe the clips of a folder."""
    ray.data.read_binary_files(source, include_paths=True, override_num_blocks=12).map_batches(
        Transcripts, batch_size=8, max_concurrency=2, compute=ray.data.ActorPoolStrategy(size=1)
    ).write_parquet(out)
