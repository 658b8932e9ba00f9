"""Audio by Ray Data."""

from __future__ import annotations

from typing import Any

import ray.data

from benchmarks.media.models import Whisper, wav_samples


class Transcripts(Whisper):
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        waves = [wav_samples(content) for content in batch["bytes"]]
        return {"path": batch["path"], "text": self.transcribe(waves)}


def run(source: str, out: str) -> None:
    """Transcribe the clips of a folder."""
    ray.data.read_binary_files(source, include_paths=True, override_num_blocks=12).map_batches(
        Transcripts, batch_size=8, num_cpus=0.5, compute=ray.data.ActorPoolStrategy(size=2)
    ).write_parquet(out)
