"""The model that every contender runs: all-MiniLM-L6-v2 on one device, in single precision."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.workloads import DIMENSIONS

BATCH = 4096
"""Rows of a call; the model takes 256 of them at a time, the longest first."""
_TOGETHER = 256


class Embedder:
    """Embeds texts with sentence-transformers.

    `SentenceTransformer.encode` waits for the vectors of a sub-batch before it tokenizes the next
    one. Here the vectors stay on the device until the end of a call, so that the CPU tokenizes
    while the GPU computes.
    """

    def __init__(self, model: str, device: str) -> None:
        """Load the weights onto the device.

        Args:
            model: The folder of the weights.
            device: Name of the device for torch, such as `cuda` or `cpu`.
        """
        os.environ["HF_HUB_OFFLINE"] = "1"
        from sentence_transformers import SentenceTransformer

        self.device = device
        self.model = SentenceTransformer(model, device=device).float().eval()
        self.tokenizer = self.model.tokenizer.backend_tokenizer
        self.tokenizer.enable_truncation(self.model.max_seq_length)
        self.tokenizer.enable_padding()

    def compute(self, text: pa.Array) -> pa.Array:
        """Return one vector per text."""
        import torch

        texts = text.to_pylist()
        order = np.argsort([-len(one) for one in texts], kind="stable")
        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), _TOGETHER):
                part = [texts[row] for row in order[start : start + _TOGETHER]]
                found.append(self.model(self._features(part))["sentence_embedding"])
            sorted_vectors = torch.cat(found).float().cpu().numpy()
        vectors = np.empty_like(sorted_vectors)
        vectors[order] = sorted_vectors
        return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSIONS)

    def _features(self, texts: list[str]) -> dict[str, Any]:
        """Tokenize texts, and copy the tokens to the device without waiting for it."""
        import torch

        tokens = self.tokenizer.encode_batch_fast(texts)
        ids = torch.from_numpy(np.array([one.ids for one in tokens]))
        mask = torch.from_numpy(np.array([one.attention_mask for one in tokens]))
        if self.device == "cuda":
            ids, mask = ids.pin_memory(), mask.pin_memory()
        return {
            "input_ids": ids.to(self.device, non_blocking=True),
            "attention_mask": mask.to(self.device, non_blocking=True),
        }

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Put the embedding in the place of the text, beside other columns."""
        embedding = self.compute(batch["text"].combine_chunks())
        return batch.drop_columns("text").append_column("embedding", embedding)
