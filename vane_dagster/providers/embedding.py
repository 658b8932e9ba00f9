"""Embeddings of a text column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster.providers.texts import TextTask

_TINY = 1e-12


@dataclass(frozen=True)
class EmbedTask(TextTask):
    """The model task of an embedding stage.

    Attributes:
        dimensions: The length of a vector; None for the model's own.
        normalize: Whether to scale vectors to length 1.
    """

    dimensions: int | None = None
    normalize: bool = True

    method = "embed"

    @property
    def schema(self) -> pa.Schema:
        """A vector of 32-bit floats. Without `dimensions`, the first run infers its size."""
        return pa.schema([pa.field(self.output, pa.list_(pa.float32(), self.dimensions or -1))])

    def describe(self, model: str) -> str:
        """Describe the request to a model, for users."""
        return f"Column `{self.column}` is embedded by {model}"

    async def query(self, provider: Any, texts: list[str]) -> Any:
        """Return a vector for each text."""
        return await provider.embed(texts, dimensions=self.dimensions)

    def refused(self, answers: Any) -> Mapping[int, BaseException]:
        """Return the errors of vectors with values that are not finite."""
        finite = np.isfinite(np.asarray(answers, dtype=np.float32)).all(axis=1)
        error = ValueError("the embedding has a null, NaN or an infinite value")
        return dict.fromkeys(np.flatnonzero(~finite).tolist(), error)

    def made(self, answers: Any) -> dict[str, Any]:
        """Return the column of vectors."""
        vectors = np.asarray(answers, dtype=np.float32)
        if not len(vectors):
            return {self.output: pa.array([], self.schema[0].type)}
        if self.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)
        return {self.output: vectors}
