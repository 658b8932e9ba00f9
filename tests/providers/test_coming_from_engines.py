"""The pages for users of other systems: our side of the snippets with an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import vane_dagster as vd
from support.coming_from_data import write_data
from support.data import read_stage
from support.results import Run
from support.snippets import PAGES, loaded, pipelines, snippets
from support.tiny_answers import greedy
from support.vllm_stages import needs_vllm

HEADING = "Language model in vLLM"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
LENGTH = '"max_model_len": 192'
OPTIONS = f'{LENGTH}, "dtype": "float32", "enforce_eager": True'
"""What the tiny model needs for equal answers, and to load fast."""
TEXTS = ["Great lamp", "Broken on arrival", "Fine", "Great chair, great price"]


@needs_vllm
@pytest.mark.usefixtures("vllm_variables")
@pytest.mark.parametrize("page", PAGES)
def test_our_side_of_a_snippet_asks_vllm(
    page: str,
    tiny: Path,
    tmp_path: Path,
    materialize: Run,
    local: vd.LocalCompute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    snippet = next(each for each in snippets(page) if each.heading == HEADING)
    with loaded(snippet, tmp_path, {MODEL: str(tiny), LENGTH: OPTIONS}) as module:
        (pipeline,) = pipelines(module)
        assert materialize(pipeline, local).success
    answers = read_stage(tmp_path / "store", "reviews", "answers")["answer"].to_pylist()
    system, texts = "", TEXTS
    if page == "ray-data":
        system, texts = "Answer in one word.", [text.lower() for text in TEXTS]
    expected = greedy(tiny, texts, system=system)
    assert list(map(trimmed, answers)) == list(map(trimmed, expected))


def trimmed(answer: str) -> str:
    """An answer without spaces around it, and without a last character that is incomplete."""
    return answer.strip().rstrip("\ufffd").strip()
