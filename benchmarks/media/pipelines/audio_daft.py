"""Audio by Daft."""

from __future__ import annotations

import asyncio

import daft

from benchmarks.media.models import Whisper, wav_samples


@daft.cls(max_concurrency=2)
class Transcripts(Whisper):
    @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=8)
    async def text(self, contents: daft.Series) -> list[str]:
        waves = [wav_samples(content) for content in contents.to_pylist()]
        return await asyncio.to_thread(self.transcribe, waves)


def run(source: str, out: str) -> None:
    """Transcribe the clips of a folder."""
    files = daft.from_glob_path(f"{source}/*.wav")
    text = Transcripts().text(files["path"].download())
    files.select("path", text.alias("text")).write_parquet(out)
