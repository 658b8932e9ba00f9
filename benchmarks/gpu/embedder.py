"""The model that every contender runs: all-MiniLM-L6-v2 on one device, in single precision."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

from benchmarks.workloads import DIMENSIONS

BATCH = 4096
"""Rows of a call; the model takes 256 of them at a time, the longest first."""


class Embedder:
    """Embeds texts with sentence-transformers."""

    def __init__(self, model: str, device: str) -> None:
        """Load the weights onto the device.

        Args:
            model: The folder of the weights.
            device: Name of the device for torch, as `cuda` or `cpu`.
        """
        os.environ["HF_HUB_OFFLINE"] = "1"
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(model, device=device).float()

    def compute(self, text: pa.Array) -> pa.Array:
        """Return one vector per text."""
        vectors = self.model.encode(text.to_pylist(), batch_size=256, show_progress_bar=False)
        flat = pa.array(np.asarray(vectors, dtype=np.float32).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, DIMENSIONS)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Put the embedding in the place of the text, beside other columns."""
        embedding = self.compute(batch["text"].combine_chunks())
        return batch.drop_columns("text").append_column("embedding", embedding)
