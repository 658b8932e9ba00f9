"""Documents by vane_dagster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import vane_dagster as vd
from benchmarks.media.models import MiniLM, pdf_chunks


class Embeddings(MiniLM):
    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"embedding": await asyncio.to_thread(self.embed, batch["text"].tolist())}


def chunks(file: vd.File) -> Iterator[dict[str, Any]]:
    """Make a row of each chunk of a document."""
    return pdf_chunks(file.read())


def pipeline(source: str, days: Any) -> vd.Pipeline:
    """Embed the documents of a folder a day."""
    files = vd.files(f"{source}/{{partition_key}}/*.pdf")
    documents = vd.Pipeline("documents", source=files, partitions_def=days)
    types = {"page": "BIGINT", "chunk": "BIGINT", "text": "VARCHAR"}
    documents.flat_map("chunks", chunks, id="id", schema=types).map_batches(
        "embeddings",
        Embeddings,
        schema={"embedding": "FLOAT[384]"},
        include_columns=list(types),
        batch_format="numpy",
        batch_size=16,
        concurrency=vd.Workers(max_concurrency=2),
    )
    return documents
