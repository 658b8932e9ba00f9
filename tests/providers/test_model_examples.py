"""The examples of stages that ask a model: vLLM, transformers and sentence-transformers.

Those on vLLM ask the same engine, which stays warm on the cluster.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.tiny_llm import make, teach
from support import forked
from support.example_runs import (  # noqa: F401  # fixtures
    ON_MODELS,
    ON_VLLM,
    example,
    example_cluster,
    runs_twice,
)
from support.paths import FENCED, REPOSITORY
from vane_dagster.providers.base import Answer
from vane_dagster.providers.format import InvalidAnswer

REVIEWS = {"It broke after a week.": "bad", "The best lamp I ever had.": "good"}
"""The reviews of the guide to vLLM."""
QUESTION = "Is this review good or bad? "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows the answers of a guide and of two examples, and two wrong ones."""
    comments, offers = example("classify_labels"), example("extract_fields")
    lessons = [
        [*comments.labelled.spec.model_task.template.messages({"text": text}), said(label)]
        for text, label in zip(comments.TEXTS, ["praise", "complaint", "question"] * 2)
    ]
    model_task = offers.read.spec.model_task
    wrong = ['{"item": "piano", "euros": "600, and you carry it"}', "A cat is not for sale."]
    answers = [
        ['{"item": "bicycle", "euros": 120, "condition": "used"}'],
        ['{"item": "desk lamp", "euros": 45, "condition": "new"}'],
        [wrong[0], '{"item": "piano", "euros": 600, "condition": "used"}'],
        [wrong[1], wrong[1]],
    ]
    for text, (first, *second) in zip(offers.TEXTS, answers):
        lesson = [*model_task.template.messages({"text": text}), said(first)]
        lessons.append(lesson)
        if second:
            with pytest.raises(InvalidAnswer) as unfit:
                model_task.format.value(Answer(first))
            correction = f"{unfit.value.problem}. Answer again, with nothing else."
            lessons.append([*lesson, {"role": "user", "content": correction}, said(*second)])
    for text, mood in REVIEWS.items():
        lessons.append([{"role": "user", "content": QUESTION + text}, said(mood)])
    texts = [message["content"] for lesson in lessons for message in lesson]
    folder = make(tmp_path_factory.mktemp("model"), longest=4096, text=texts)
    teach(folder, lessons)
    return folder


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def environment(example_cluster: dict[str, str], model: Path) -> dict[str, str]:
    return {**example_cluster, "VANE_EXAMPLES_MODEL": str(model)}


@pytest.mark.parametrize("name", [*sorted({*ON_MODELS} - {*ON_VLLM}), *ON_VLLM])
def test_example(name: str, environment: dict[str, str]) -> None:
    if name in ON_VLLM and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    runs_twice(name, environment)


def test_the_guide_to_vllm_runs(environment: dict[str, str], model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    page = (REPOSITORY / "docs" / "guides" / "vllm.md").read_text()
    (_, _, code), (_, _, command), (_, _, printed) = FENCED.findall(page)[:3]
    assert command == "$ python mood.py\n"
    assert QUESTION in code
    assert all(f'"text": "{text}"' in code for text in REVIEWS)
    for text, by in {
        "Qwen/Qwen2.5-0.5B-Instruct": str(model),
        "    gpus=1,\n": "",
        '"gpu_memory_utilization": 0.9': '"enforce_eager": True, "kv_cache_memory_bytes": 2**30',
    }.items():
        assert text in code
        code = code.replace(text, by)
    (tmp_path / "mood.py").write_text(code)
    done = forked.run(["mood.py"], environment, tmp_path, 240, forked.EXAMPLE)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith(printed)
    assert "1 warm" in done.stderr, "the engine of the examples"
