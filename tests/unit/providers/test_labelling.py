"""Labels that a classifier returns, and vectors of an embedding model."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.errors import RowErrors
from vane_dagster.providers.embedding import EmbedTask
from vane_dagster.providers.labelling import ClassifyTask

TASK = ClassifyTask("text", "label", labels=("good", "bad"))
FAILED = RuntimeError("too long")


class Classifier:
    """Returns texts as labels; fails for "long"."""

    async def classify(self, texts: list[str], labels: Any) -> Any:
        errors = {place: FAILED for place, text in enumerate(texts) if text == "long"}
        found = [(text, 1.0) for text in texts if text != "long"]
        if errors:
            raise RowErrors(errors, found)
        return found


@pytest.mark.parametrize(
    ("texts", "labels", "failed"),
    [
        (["good", "bad"], ["good", "bad"], []),
        (["odd", "good", None], ["good"], [0, 2]),
        (["long", "odd", "good", None, "bad"], ["good", "bad"], [0, 1, 3]),
        (["long", "odd"], None, [0, 1]),
    ],
)
def test_an_unknown_label_is_the_error_of_its_row(texts, labels, failed):
    batch = pa.table({"text": pa.array(texts, pa.string())})
    try:
        rows: Any = asyncio.run(TASK.run(Classifier(), batch))
        places: list[int] = []
    except RowErrors as error:
        rows, places = error.rows, [*error.errors]
        messages = [str(each) for each in error.errors.values()]
        assert all(word in str(messages) for word in ("odd",) if word in texts)
    assert (rows and rows["label"].to_pylist()) == labels
    assert places == failed


def test_a_vector_with_a_value_that_is_not_finite_is_the_error_of_its_row():
    class Embedder:
        async def embed(self, texts: list[str], dimensions: int | None) -> Any:
            return [
                {"null": [None, 1.0], "nan": [0.0, float("nan")]}.get(t, [3.0, 4.0]) for t in texts
            ]

    batch = pa.table({"text": ["a", "null", "b", "nan"]})
    with pytest.raises(RowErrors) as raised:
        asyncio.run(EmbedTask("text", "vector").run(Embedder(), batch))
    assert [*raised.value.errors] == [1, 3]
    np.testing.assert_allclose(raised.value.rows["vector"], [[0.6, 0.8]] * 2, rtol=1e-6)


def test_models_that_sort_the_texts_of_a_call_get_more_of_them():
    docs = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    sizes = [
        docs.embed(provider, "text", model="m", provider=provider).spec.batch_size
        for provider in ("sentence_transformers", "openai")
    ]
    assert sizes == [256, 64]
