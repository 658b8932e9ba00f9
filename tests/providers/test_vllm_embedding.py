"""Embeddings by the provider "vllm"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.results import failure
from support.tiny_answers import vectors
from support.vllm_stages import ENGINE, ENV, TEXTS, ask, docs, needs_vllm, read, watched

SIZE = 64


pytestmark = pytest.mark.usefixtures("vllm_variables")


def embed(above: Any, model: Path, name: str = "embedded", **kwargs: Any) -> vd.Stage:
    settings = {k: v for k, v in ENGINE.items() if k != "structured_outputs_config"}
    given = {**settings, **kwargs.pop("engine_kwargs", {})}
    return above.embed(
        name,
        "text",
        provider="vllm",
        model=vd.Model(str(model), options={"engine_kwargs": given}),
        concurrency=vd.Workers(env_vars=ENV),
        **grouped(kwargs),
    )


def test_one_name_is_an_engine_that_generates_or_one_that_embeds(tmp_path):
    pipeline = docs(tmp_path)
    asked, embedded = ask(pipeline, tmp_path), embed(pipeline, tmp_path)
    kinds = [stage.spec.provider.__name__ for stage in (asked, embedded)]
    assert kinds == ["VllmProvider", "VllmEmbedder"]
    assert embedded.spec.model.options == {
        "engine_kwargs": {"dtype": "float32", "max_model_len": 192}
    }


@needs_vllm
def test_stages_that_normalize_and_do_not_share_an_engine(tiny, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    embed(pipeline, tiny, include_columns=["text"])
    embed(pipeline["embedded"], tiny, "raw", normalize=False)
    pids: set[int] = set()
    with watched(pids):
        materialize(pipeline, local)

    assert len(pids) == 1
    rows = read(tmp_path, "embedded")
    expected = vectors(tiny, TEXTS)
    assert expected.shape == (len(TEXTS), SIZE)
    assert np.allclose(rows["embedded"].to_pylist(), expected, atol=1e-5)
    raw = np.array(read(tmp_path, "raw")["raw"].to_pylist())
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert not np.allclose(lengths, 1)
    assert np.allclose(raw / lengths, expected, atol=1e-5)


@needs_vllm
def test_vectors_of_fewer_dimensions(tiny, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    embed(pipeline, tiny, dimensions=16, on_error="quarantine")
    message = failure(materialize(pipeline, local, raises=False))
    assert "dimensions=16 is refused by vLLM" in message
    assert "does not support Matryoshka" in message
    assert "engine_kwargs={'hf_overrides': {'is_matryoshka': True}}" in message

    pipeline = docs(tmp_path)
    allowed = {
        "hf_overrides": {"is_matryoshka": True},
        "pooler_config": {"seq_pooling_type": "LAST"},
    }
    embed(pipeline, tiny, dimensions=16, engine_kwargs=allowed)
    materialize(pipeline, local)

    rows = read(tmp_path, "embedded")
    assert rows.schema.field("embedded").type == pa.list_(pa.float32(), 16)
    cut = vectors(tiny, TEXTS)[:, :16]
    cut /= np.linalg.norm(cut, axis=1, keepdims=True)
    assert np.allclose(rows["embedded"].to_pylist(), cut, atol=1e-5)
