"""Documents by Ray Data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray.data

from benchmarks.media.models import MiniLM, pdf_chunks


class Embeddings(MiniLM):
    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield {**batch, "embedding": await asyncio.to_thread(self.embed, batch["text"].tolist())}


def chunks(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make a row of each chunk of a document."""
    for chunk in pdf_chunks(row["bytes"]):
        yield {"path": row["path"], **chunk}


def run(source: str, out: str) -> None:
    """Embed the documents of a folder."""
    ray.data.read_binary_files(source, include_paths=True, override_num_blocks=8).flat_map(
        chunks
    ).map_batches(
        Embeddings, batch_size=16, max_concurrency=2, compute=ray.data.ActorPoolStrategy(size=1)
    ).write_parquet(out)
