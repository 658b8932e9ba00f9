"""The pages for users of other systems: our side of the snippets with an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import vane_dagster as vd
from support.coming_from_data import TEXTS, write_data
from support.data import read_stage
from support.results import materializing
from support.snippets import PAGES, loaded, pipelines, snippets
from support.tiny_answers import greedy
from support.vllm_stages import needs_vllm, warm  # noqa: F401  # fixtures

HEADING = "Language model in vLLM"
SNIPPETS = {page: each for page in PAGES for each in snippets(page) if each.heading == HEADING}
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
LENGTH = '"max_model_len": 192'
OPTIONS = f'{LENGTH}, "dtype": "float32", "enforce_eager": True'
"""What the tiny model needs for equal answers, and to load fast."""


@needs_vllm
@pytest.mark.usefixtures("vllm_variables")
def test_our_side_of_each_snippet_asks_vllm(
    tiny: Path, tmp_path: Path, warm: vd.LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    for page, snippet in SNIPPETS.items():
        with loaded(snippet, tmp_path, {MODEL: str(tiny), LENGTH: OPTIONS}) as module:
            (pipeline,) = pipelines(module)
            assert materializing(tmp_path / page)(pipeline, warm).success
    expected = dict.fromkeys(SNIPPETS, greedy(tiny, TEXTS))
    lower = [text.lower() for text in TEXTS]
    expected["ray-data"] = greedy(tiny, lower, system="Answer in one word.")
    for page in SNIPPETS:
        rows = read_stage(tmp_path / page / "store", "reviews", "answers")
        assert [*map(trimmed, rows["answer"].to_pylist())] == [*map(trimmed, expected[page])]


def trimmed(answer: str) -> str:
    """An answer without spaces around it, and without a last character that is incomplete."""
    return answer.strip().rstrip("\ufffd").strip()
