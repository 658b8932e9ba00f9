"""Documents by Daft."""

from __future__ import annotations

import asyncio
from typing import Any

import daft
from daft import DataType

from benchmarks.media.models import MiniLM, pdf_chunks

CHUNK = DataType.struct(
    {"page": DataType.int64(), "chunk": DataType.int64(), "text": DataType.string()}
)


@daft.func(return_dtype=DataType.list(CHUNK))
def chunks(content: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a document."""
    return list(pdf_chunks(content))


@daft.cls(max_concurrency=2)
class Embeddings(MiniLM):
    @daft.method.batch(
        return_dtype=DataType.fixed_size_list(DataType.float32(), 384), batch_size=16
    )
    async def embedding(self, texts: daft.Series) -> Any:
        return await asyncio.to_thread(self.embed, texts.to_pylist())


def run(source: str, out: str) -> None:
    """Embed the documents of a folder."""
    files = daft.from_glob_path(f"{source}/*.pdf")
    rows = files.select("path", chunks(files["path"].download()).alias("chunk")).explode("chunk")
    rows = rows.select("path", rows["chunk"].unnest())
    rows.with_column("embedding", Embeddings().embedding(rows["text"])).write_parquet(out)
