"""Prompts with sounds to a tiny model of sounds and text, on vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.media import sound, tone
from support.results import Run
from support.tiny_answers import of_media
from support.tiny_transformers import audio_text_model
from support.vllm_stages import BY, ENV, arguments, local  # noqa: F401  # fixtures

GREEDY = {"temperature": 0, "max_tokens": 8}
ASKED = "What is that?"
RATE = 16_000
TONES = [tone(hertz) for hertz in (200, 800, 2000, 6000)]


def expected(folder: Path, sounds: list[np.ndarray]) -> list[str]:
    """Return transformers' own answer about each sound alone."""
    from transformers import Qwen2AudioForConditionalGeneration

    content = [{"type": "text", "text": ASKED}, {"type": "audio"}]
    waves = [samples.astype(np.float32) / 2**15 for samples in sounds]
    asked = [(content, {"audio": [wave], "sampling_rate": RATE}) for wave in waves]
    return of_media(folder, Qwen2AudioForConditionalGeneration, asked)


@pytest.mark.parametrize("by", BY[1:])
def test_answers_are_the_models_own(
    by: str,
    tmp_path: Path,
    local: vd.LocalCompute,
    materialize: Run,
    vllm_variables: None,
) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    model = audio_text_model(tmp_path / "model")
    files = [sound(each, RATE) for each in TONES]
    sounds = [*([file] for file in files), files[:2], [files[0][:40]]]
    if by == "vllm":  # a server answers as if it were overloaded
        sounds.append([sound(tone(200, rate=8000))])
    write_source(tmp_path / "src", {"id": range(len(sounds)), "sounds": sounds})
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    by_model = arguments(by, model, max_model_len=1024)
    given = {"sampling_params": GREEDY, "env_vars": ENV, **aside, **by_model}
    pipeline.prompt("heard", [ASKED, vd.audio("sounds")], **grouped(given))

    assert materialize(pipeline, local).success

    rows = read_stage(tmp_path / "store", "docs", "heard").sort_by("id")
    answers = [answer.rstrip("\ufffd") for answer in rows["heard"].to_pylist()]
    assert answers[:4] == expected(model, TONES)
    assert len(set(answers[:4])) > 1, "the model hears the sounds"
    tokens = [usage["prompt_tokens"] for usage in rows["heard_usage"].to_pylist()]
    assert tokens[4] - tokens[0] == 12, "half a second"
    found = vd.quarantine("docs/heard", store=str(tmp_path / "store")).sort_by("id").to_pylist()
    faults = {fault["id"]: fault["message"] for fault in found}
    assert "No 'data' chunk marker" in faults.pop(5)
    if by == "vllm" and importlib.util.find_spec("torchaudio"):
        assert tokens[5] == tokens[0], "resampled"
    elif by == "vllm":
        assert "vLLM cannot read the files of the row: No module named 'torchaudio'" in faults.pop(
            6
        )
    assert not faults
