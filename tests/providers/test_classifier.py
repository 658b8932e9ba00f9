"""Models that do not fit a classifier."""

from __future__ import annotations

import re

import pytest


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
