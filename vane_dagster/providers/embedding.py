"""Embeddings of a column of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster.errors import RowErrors

_TINY = 1e-12


@dataclass(frozen=True)
class Embed:
    """What an embedding stage asks of each row.

    Attributes:
        column: The column of texts.
        output: The column of vectors.
        dimensions: Numbers of a vector; None for as many as the model gives.
        normalize: Whether vectors are made of length 1.
        carried: Columns that are passed on.
    """

    column: str
    output: str
    dimensions: int | None = None
    normalize: bool = True
    carried: tuple[str, ...] = ()

    method = "embed"

    @property
    def reads(self) -> tuple[str, ...]:
        """The column of texts, and those that are passed on."""
        return tuple(dict.fromkeys((self.column, *self.carried)))

    @property
    def schema(self) -> pa.Schema:
        """A vector, of a fixed size where the stage gives it."""
        return pa.schema([pa.field(self.output, pa.list_(pa.float32(), self.dimensions or -1))])

    @property
    def keyed(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        return {
            "column": self.column,
            "output_column": self.output,
            "dimensions": self.dimensions,
            "normalize": self.normalize,
            "include_columns": self.carried,
        }

    def told(self, model: str) -> str:
        """See `Recipe`."""
        return f"Column `{self.column}` is embedded by {model}"

    async def run(self, provider: Any, batch: pa.Table) -> dict[str, Any]:
        """Embeds the texts of a batch together; a null is an error of its row."""
        texts = batch.column(self.column).to_pylist()
        errors: dict[int, BaseException] = {
            place: ValueError(f"column {self.column!r} is {_shown(text)}; expected a text")
            for place, text in enumerate(texts)
            if not isinstance(text, str)
        }
        kept = [place for place in range(len(texts)) if place not in errors]
        taken = batch.take(pa.array(kept, pa.int64()))
        found = await provider.embed([texts[i] for i in kept], self.dimensions) if kept else []
        vectors = np.asarray(found, dtype=np.float32)
        if self.normalize and kept:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY)
        given = {name: taken.column(name) for name in (batch.column_names[0], *self.carried)}
        rows = {**given, self.output: vectors if kept else pa.array([], self.schema[0].type)}
        if errors:
            raise RowErrors(errors, rows if kept else None)
        return rows


def _shown(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
