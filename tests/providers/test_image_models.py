"""Prompts with images to a tiny model of images and text, on transformers and on vLLM."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage, write_source
from support.media import picture
from support.results import Run
from support.tiny_answers import of_media
from support.tiny_transformers import image_text_model
from support.vllm_stages import BY, ENV, arguments, local  # noqa: F401  # fixtures

COLORS = ["navy", "white", "orange", "darkgreen"]
GREEDY = {"temperature": 0, "max_tokens": 8}
PARTS = ["What is on the picture?", vd.image("images"), "Answer: {id}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_text_model(tmp_path_factory.mktemp("llava"))


def expected(model: Path, rows: list[list[bytes]]) -> list[str]:
    """Return transformers' own answer to each row alone."""
    from transformers import AutoModelForImageTextToText

    asked = []
    for place, encoded in enumerate(rows):
        texts = [{"type": "text", "text": text} for text in (PARTS[0], f"Answer: {place}")]
        shown = [{"type": "image"} for _ in encoded]
        content = [texts[0], *shown, texts[1]]
        if not encoded:  # of texts alone, one text is made
            content = [{"type": "text", "text": f"{PARTS[0]}\nAnswer: {place}"}]
        images = [Image.open(io.BytesIO(each)) for each in encoded]
        asked.append((content, {"images": images or None, "add_special_tokens": False}))
    return of_media(model, AutoModelForImageTextToText, asked)


@pytest.mark.parametrize("by", BY)
def test_answers_are_the_models_own(
    by: str,
    model: Path,
    tmp_path: Path,
    local: vd.LocalCompute,
    materialize: Run,
    vllm_variables: None,
) -> None:
    images = [[picture(size=(32, 32), color=color)] for color in COLORS]
    images += [[images[0][0], images[1][0]], [], [picture("JPEG", (640, 480))[:2000]]]
    ids = pa.array(range(len(images)), pa.int64())
    write_source(tmp_path / "src", {"id": ids, "images": images})
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    given = {"sampling_params": GREEDY, "env_vars": ENV, **aside, **arguments(by, model)}
    pipeline.prompt("asked", PARTS, **grouped(given))

    assert materialize(pipeline, local).success

    rows = read_stage(tmp_path / "store", "docs", "asked").sort_by("id")
    assert rows["id"].to_pylist() == [*range(len(images) - 1)]
    answers = [answer.rstrip("\ufffd") for answer in rows["asked"].to_pylist()]
    assert answers == expected(model, images[:-1])
    assert len(set(answers[:4])) > 1, "the model sees the images"
    tokens = [usage["prompt_tokens"] for usage in rows["asked_usage"].to_pylist()]
    assert tokens[4] - tokens[0] == 4 + 3, "an image and its marks"
    (fault,) = vd.quarantine("docs/asked", store=str(tmp_path / "store")).to_pylist()
    assert fault["id"] == len(images) - 1
    assert fault["error"] == ("BadRequestError" if by == "vllm server" else "ValueError")
    assert "image file is truncated" in fault["message"]
