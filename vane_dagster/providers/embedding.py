"""Embeddings of a text column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster.errors import RowErrors

_TINY = 1e-12


@dataclass(frozen=True)
class EmbedTask:
    """The model task of an embedding stage.

    Attributes:
        column: The text column. A null is a row error.
        output: The output column.
        dimensions: The length of a vector; None for the model's own.
        normalize: Whether to scale vectors to length 1.
    """

    column: str
    output: str
    dimensions: int | None = None
    normalize: bool = True

    method = "embed"
    order = None
    classes = ()
    functions = ()
    preloaded = ()
    usage = None
    contents = ()
    features: ClassVar[Mapping[str, str]] = {}
    sampling: ClassVar[Mapping[str, Any]] = {}

    @property
    def reads(self) -> tuple[str, ...]:
        """The text column."""
        return (self.column,)

    @property
    def needed(self) -> tuple[str, ...]:
        """All columns that it reads."""
        return self.reads

    @property
    def schema(self) -> pa.Schema:
        """A vector of 32-bit floats. Without `dimensions`, the first run infers its size."""
        return pa.schema([pa.field(self.output, pa.list_(pa.float32(), self.dimensions or -1))])

    def keyed(self, include: Any) -> Mapping[str, Any]:
        """Return the values that change the output, in a frozen order."""
        return {
            "column": self.column,
            "output_column": self.output,
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "include_columns": include,
        }

    def describe(self, model: str) -> str:
        """Describe the request to a model, for users."""
        return f"Column `{self.column}` is embedded by {model}"

    async def run(self, provider: Any, batch: pa.Table) -> Mapping[str, Any]:
        """Embed the texts of a batch together."""
        texts = batch.column(self.column).to_pylist()
        errors: dict[int, BaseException] = {
            place: ValueError(f"column {self.column!r} is {_shown(text)}; expected text")
            for place, text in enumerate(texts)
            if not isinstance(text, str)
        }
        kept = [place for place in range(len(texts)) if place not in errors]
        given = [texts[place] for place in kept]
        try:
            answers = await provider.embed(given, dimensions=self.dimensions) if kept else []
        except RowErrors as error:
            errors |= {kept[place]: failed for place, failed in error.errors.items()}
            kept = [place for place in kept if place not in errors]
            answers = error.rows if kept else []
        vectors = np.asarray(answers, dtype=np.float32)
        if kept and not (finite := np.isfinite(vectors).all(axis=1)).all():
            wrong = ValueError("the embedding has a null, NaN or an infinite value")
            errors |= {kept[place]: wrong for place in np.flatnonzero(~finite).tolist()}
            vectors = vectors[finite]
        if errors:
            made = self._made(vectors) if len(vectors) else None
            raise RowErrors(dict(sorted(errors.items())), made)
        return self._made(vectors)

    def _made(self, vectors: Any) -> dict[str, Any]:
        """Return the column of vectors."""
        if not len(vectors):
            return {self.output: pa.array([], self.schema[0].type)}
        if self.normalize:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)
        return {self.output: vectors}


def _shown(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
