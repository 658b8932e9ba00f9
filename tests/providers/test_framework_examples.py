"""The examples of deep learning and other frameworks, and what workers know of these."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from support.example_runs import (  # noqa: F401  # fixtures
    ON_FRAMEWORKS,
    example,
    example_cluster,
    runs_twice,
)
from support.tiny_transformers import image_classifier, resnet, text_classifier


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models for the pipelines of transformers, which know the right answers."""
    from PIL import Image, ImageColor

    folder = tmp_path_factory.mktemp("classifiers")
    reviews, messages = example("hf_text_classification"), example("hf_zero_shot")
    kinds = ["POSITIVE", "NEGATIVE"] * 2
    sentiment = text_classifier(folder / "sentiment", list(zip(reviews.TEXTS, kinds)))
    right = zip(messages.TEXTS, ["delivery", "payment", "delivery"])
    pairs = [
        ((text, f"This example is {topic}."), "entailment" if topic == wanted else "contradiction")
        for text, wanted in right
        for topic in ("delivery", "payment")
    ]
    nli = text_classifier(folder / "nli", pairs)
    colors = zip(example("hf_image_classification").COLORS, ["red", "blue"] * 2)
    images = [(Image.new("RGB", (64, 48), color), label) for color, label in colors]
    vision = image_classifier(folder / "vision", images)
    photos = [
        (np.full((224, 224, 3), ImageColor.getrgb(color), np.uint8), label)
        for color, label in zip(example("photo_labels").COLORS, ["red", "blue"] * 2)
    ]
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    return {
        "VANE_EXAMPLES_RESNET": str(resnet(folder / "resnet", photos, mean, std)),
        "VANE_EXAMPLES_SENTIMENT": str(sentiment),
        "VANE_EXAMPLES_NLI": str(nli),
        "VANE_EXAMPLES_VISION": str(vision),
    }


@pytest.mark.parametrize("name", sorted(ON_FRAMEWORKS))
def test_example(name: str, example_cluster: dict[str, str], classifiers: dict[str, str]) -> None:
    if importlib.util.find_spec(ON_FRAMEWORKS[name]) is None:
        pytest.skip(f"{ON_FRAMEWORKS[name]} is not installed")
    runs_twice(name, {**example_cluster, **classifiers})
