"""Models and arguments that do not fit a classifier."""

from __future__ import annotations

import re

import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.prompts import docs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"architectures": ["BertLMHeadModel"]},
            "is 'BertLMHeadModel'; expected one that ends in 'ForSequenceClassification'",
        ),
        (
            {"problem_type": "multi_label_classification", "num_labels": 3},
            "has num_labels=3 and problem_type='multi_label_classification'",
        ),
    ],
)
def test_a_model_that_gives_no_label(settings, message, tmp_path):
    from transformers import BertConfig

    from vane_dagster.providers.transformers_classifier import TransformersClassifier

    given = {"architectures": ["BertForSequenceClassification"], **settings}
    BertConfig(**given).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformersClassifier(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ["a", "a"]}, "expected different labels"),
        ({"labels": "praise"}, "labels is 'praise'; expected a list of names"),
        ({"output_column": ""}, "output_column is ''; expected a name"),
        ({"provider": "transformer_classifier"}, "unknown provider 'transformer_classifier'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, tmp_path):
    given = {"provider": "transformers_classifier", "model": "m", "labels": ["a", "b"]}
    with pytest.raises(vd.DefinitionError, match=message):
        docs(tmp_path).classify("labelled", "text", **grouped({**given, **arguments}))
