"""Documents by vane_dagster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import vane_dagster as vd
from benchmarks.media.models import MiniLM, pdf_chunks


class Embeddings(MiniLM):
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"embedding": self.embed(batch["text"].tolist())}


def chunks(file: vd.File) -> Iterator[dict[str, Any]]:
    """Make a row of each chunk of a document."""
    return pdf_chunks(file.read())


def definitions(source: str, out: str) -> Any:
    """Embed the documents of a folder."""
    import dagster as dg

    files = vd.files(f"{source}/{{partition_key}}/*.pdf")
    days = dg.StaticPartitionsDefinition(["p0", "p1"])
    documents = vd.Pipeline("documents", source=files, partitions_def=days)
    types = {"page": "BIGINT", "chunk": "BIGINT", "text": "VARCHAR"}
    documents.flat_map("chunks", chunks, id="id", schema=types).map_batches(
        "embeddings",
        Embeddings,
        schema={"embedding": "FLOAT[384]"},
        include_columns=["page", "chunk", "text"],
        batch_format="numpy",
        batch_size=16,
        concurrency=2,
    )
    resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=out)}
    return dg.Definitions(assets=[documents.build_assets()], resources=resources)
