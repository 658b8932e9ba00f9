"""The provider "vllm" where a model can't be loaded, and on two ranks."""

from __future__ import annotations

import os
import shutil

import pytest

from support.results import failure
from support.tiny_answers import greedy
from support.vllm_stages import (  # noqa: F401  # fixtures
    TEXTS,
    answers,
    ask,
    docs,
    local,
    needs_vllm,
)

pytestmark = pytest.mark.usefixtures("vllm_variables")


@needs_vllm
def test_a_model_that_the_engine_cannot_load_says_why(tiny, tmp_path, local, materialize):
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    pipeline = docs(tmp_path)
    ask(pipeline, model)
    message = failure(materialize(pipeline, local, raises=False))
    first = message.partition("\n\n")[0]
    assert first.startswith(f"stage 'docs/asked': VllmProvider('{model}') could not be constructed")
    assert "EngineLoadError: vLLM's engine did not start: " in first
    assert "SafetensorError: Error while deserializing header" in first


@needs_vllm
def test_a_model_without_a_chat_template_on_two_ranks(
    tiny, tmp_path, local, materialize, monkeypatch
):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("each rank needs a core")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    model, system = tmp_path / "model", "Be brief."
    shutil.copytree(tiny, model)
    (model / "chat_template.jinja").unlink()
    pipeline = docs(tmp_path)
    ask(pipeline, model, options={"tensor_parallel_size": 2}, system=system)
    materialize(pipeline, local)
    assert answers(tmp_path) == greedy(model, TEXTS, system=system)
    assert answers(tmp_path) != greedy(tiny, TEXTS, system=system)
