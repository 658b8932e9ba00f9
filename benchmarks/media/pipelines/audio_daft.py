"""Audio by Daft."""

from __future__ import annotations

import daft

from benchmarks.media.models import Whisper, wav_samples


@daft.cls
class Transcripts(Whisper):
    @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=8)
    def text(self, contents: daft.Series) -> list[str]:
        return self.transcribe([wav_samples(content) for content in contents.to_pylist()])


def run(source: str, out: str) -> None:
    """Transcribe the clips of a folder."""
    files = daft.from_glob_path(f"{source}/*.wav")
    text = Transcripts().text(files["path"].download())
    files.select("path", text.alias("text")).write_parquet(out)
