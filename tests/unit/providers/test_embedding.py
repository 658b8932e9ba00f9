"""Vectors of an embedding model."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.errors import RowErrors
from vane_dagster.providers.embedding import EmbedTask

FAILED = RuntimeError("too long")


def test_a_vector_with_a_value_that_is_not_finite_is_the_error_of_its_row():
    class Embedder:
        async def embed(self, texts: list[str], dimensions: int | None) -> Any:
            failed = {place: FAILED for place, text in enumerate(texts) if text == "long"}
            vectors = [
                {"null": [None, 1.0], "nan": [0.0, float("nan")]}.get(text, [3.0, 4.0])
                for text in texts
                if text != "long"
            ]
            if failed:
                raise RowErrors(failed, vectors)
            return vectors

    def failure(*texts: str | None) -> RowErrors:
        batch = pa.table({"text": pa.array(texts, pa.string())})
        with pytest.raises(RowErrors) as raised:
            asyncio.run(EmbedTask("text", "vector").run(Embedder(), batch))
        return raised.value

    error = failure("a", "null", "b", "nan")
    assert [*error.errors] == [1, 3]
    np.testing.assert_allclose(error.rows["vector"], [[0.6, 0.8]] * 2, rtol=1e-6)
    error = failure("long", "nan", "a", None, "b")
    assert [*error.errors] == [0, 1, 3]
    assert error.errors[0] is FAILED
    np.testing.assert_allclose(error.rows["vector"], [[0.6, 0.8]] * 2, rtol=1e-6)
    for texts in (("long", "nan"), (None,), ("long", None)):
        error = failure(*texts)
        assert (len(error.errors), error.rows) == (len(texts), None)


def test_models_that_sort_the_texts_of_a_call_get_more_of_them():
    docs = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    sizes = [
        docs.embed(provider, "text", model="m", provider=provider).spec.batch_size
        for provider in ("sentence_transformers", "openai")
    ]
    assert sizes == [256, 64]
