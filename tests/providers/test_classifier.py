"""Labels by a classifier: a model that has learnt them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from benchmarks.tiny_llm import make
from support.data import read_stage, write_source
from support.results import failure

TEXTS = ["a fox", "a dog", "the fox and the dog", "nothing at all", "12, 34", "yes or no"]
LABELS = ["praise", "blame", "neither"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _classifier(tmp_path_factory.mktemp("classifier"))


def _classifier(folder: Path, labels: list[str] = LABELS, **settings: Any) -> Path:
    """A tiny Bert with random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    make(folder)  # for its tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=96,
        initializer_range=1.0,
        id2label=dict(enumerate(labels)),
        label2id={label: place for place, label in enumerate(labels)},
        **settings,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def _expected(folder: Path, texts: list[str]) -> list[tuple[str, float]]:
    """What the model gives to each text alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    found = []
    for text in texts:
        with torch.inference_mode():
            scores = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        best = int(scores.argmax())
        found.append((model.config.id2label[best], float(scores[best])))
    return found


def docs(tmp_path: Path, texts: list[Any] = TEXTS) -> vd.Pipeline:
    table = {"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts, pa.string())}
    write_source(tmp_path / "src", table)
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def classified(pipeline: vd.Pipeline, model: Any, labels: Any = LABELS, **kwargs: Any) -> vd.Stage:
    given = {"provider": "transformers_classifier", "model": str(model), **kwargs}
    return pipeline.classify("labelled", "text", labels, **given)


def test_texts_are_labelled_by_a_models_own_head(classifier, tmp_path, local, materialize):
    pipeline = docs(tmp_path, [*TEXTS, "word " * 200, None])
    classified(
        pipeline,
        classifier,
        LABELS[::-1],
        include_columns=["text"],
        provider_options={"batch_size": 4},
        on_error="quarantine",
        max_error_rate=0.5,
    )

    materialize(pipeline, local)

    rows = read_stage(tmp_path / "store", "docs", "labelled")
    assert rows.schema.names == ["id", "text", "label", "label_score"]
    assert rows["text"].to_pylist() == TEXTS
    expected = _expected(classifier, TEXTS)
    assert rows["label"].to_pylist() == [label for label, _ in expected]
    assert len({label for label, _ in expected}) > 1
    assert rows["label_score"].to_pylist() == pytest.approx(
        [score for _, score in expected], abs=1e-4
    )
    aside = vd.quarantine("docs/labelled", store=str(tmp_path / "store")).sort_by("id")
    assert aside["error"].to_pylist() == ["PromptTooLong", "ValueError"]
    assert "tokens; the model takes 96" in aside["message"][0].as_py()


def test_labels_that_the_model_does_not_have(classifier, tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    classified(pipeline, classifier, ["praise", "insult"], on_error="quarantine")

    message = failure(materialize(pipeline, local, raises=False))

    assert (
        "labels are 'praise', 'insult'; the model has 'praise', 'blame', 'neither', and a "
        "classifier's labels are all of them" in message
    )


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (make, "is 'Qwen2ForCausalLM'; expected one that ends in 'ForSequenceClassification'"),
        (
            lambda folder: _classifier(folder, problem_type="multi_label_classification"),
            "has num_labels=3 and problem_type='multi_label_classification'",
        ),
    ],
)
def test_a_model_that_gives_no_label(built, message, tmp_path):
    from vane_dagster.providers.transformers_classifier import TransformersClassifier

    built(tmp_path)
    with pytest.raises(ValueError, match=message):
        TransformersClassifier(str(tmp_path))


class Lengths:
    """A classifier of a user's own, which invents a label."""

    def __init__(self, model: str) -> None:
        self.model = model

    async def classify(self, texts: list[str], labels: list[str]) -> list[tuple[str, float]]:
        return [("odd" if text == "a fox" else labels[len(text) % 2], 0.5) for text in texts]


def test_a_classifier_of_a_users_own(tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    given = {"on_error": "quarantine", "max_error_rate": 0.5, "output_column": "kind"}
    classified(pipeline, "m", {"even": "", "uneven": ""}, provider=Lengths, **given)

    materialize(pipeline, local)

    rows = read_stage(tmp_path / "store", "docs", "labelled")
    expected = [("even", "uneven")[len(text) % 2] for text in TEXTS[1:]]
    assert rows["kind"].to_pylist() == expected
    assert rows["kind_score"].to_pylist() == [0.5] * len(expected)
    aside = vd.quarantine("docs/labelled", store=str(tmp_path / "store"))
    assert aside["message"].to_pylist() == ["the label is 'odd'; expected one of 'even', 'uneven'"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": {"temperature": 0}}, "unknown argument 'sampling_params'"),
        ({"labels": ["a", "a"]}, "labels has one twice"),
        ({"labels": "praise"}, "labels is 'praise'; expected a list of labels"),
        ({"output_column": ""}, "output_column is ''; expected a name"),
        ({"provider": "transformer_classifier"}, "unknown provider 'transformer_classifier'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, tmp_path):
    with pytest.raises(vd.DefinitionError, match=message):
        classified(docs(tmp_path), "m", **{"labels": LABELS, **arguments})
