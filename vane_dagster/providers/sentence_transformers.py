"""A SentenceTransformer model, loaded in the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vane_dagster.providers.registry import needs


class SentenceTransformersProvider:
    """Computes embeddings, on a GPU if one is available.

    The texts of a call are sorted by length and computed in batches, so that little is padded.
    """

    TEXTS_OF_A_CALL = 256
    PACKAGES = ("sentence_transformers", "torch", "transformers")
    OPERATIONAL = frozenset({"batch_size", "device"})

    def __init__(self, model: str, *, batch_size: int = 64, **options: Any) -> None:
        library = needs("sentence_transformers", "torch")
        self._model = library.SentenceTransformer(model, **options)
        self._batch_size = batch_size
        self._turn = asyncio.Lock()

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """See `Embedder.embed`."""
        async with self._turn:
            return await asyncio.to_thread(self._encode, list(texts), dimensions)

    def _encode(self, texts: list[str], dimensions: int | None) -> Any:
        vectors = self._model.encode(
            texts,
            batch_size=self._batch_size,
            truncate_dim=dimensions,
            show_progress_bar=False,
            convert_to_tensor=True,  # as arrays, each batch would wait for its copy from the GPU
        )
        return vectors.float().cpu().numpy()
