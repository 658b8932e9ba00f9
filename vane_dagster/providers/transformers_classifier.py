"""A Hugging Face model for sequence classification, in the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vane_dagster.errors import RowErrors, StageError, names
from vane_dagster.providers.base import PromptTooLong
from vane_dagster.providers.registry import needs

_HEAD = "ForSequenceClassification"
_UNLIMITED = 1_000_000
"""The `model_max_length` of a tokenizer without a limit is larger than this."""


class TransformersClassifier:
    """Classifies with a model's own head, in batches, on a GPU if one is available."""

    TEXTS_OF_A_CALL = 256
    PACKAGES = ("torch", "transformers")
    OPERATIONAL = frozenset({"batch_size", "device"})

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        batch_size: int = 32,
        dtype: str = "auto",
        device: str | None = None,
    ) -> None:
        library = needs("transformers", "transformers")
        config = library.AutoConfig.from_pretrained(model, revision=revision)
        _check_head(model, config)
        self._labels = [str(label) for label in config.id2label.values()]
        self._pipeline = library.pipeline(
            "text-classification",
            model,
            revision=revision,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            function_to_apply="softmax",
        )
        self._tokenizer = self._pipeline.tokenizer
        places = getattr(config, "max_position_embeddings", None)
        limits = (places, self._tokenizer.model_max_length)
        self._longest = min((n for n in limits if n and 0 < n < _UNLIMITED), default=_UNLIMITED)
        self._turn = asyncio.Lock()

    async def classify(
        self, texts: Sequence[str], labels: Sequence[str]
    ) -> Sequence[tuple[str, float]]:
        """See `Classifier.classify`."""
        if set(labels) != set(self._labels):
            raise StageError(
                f"labels are {names(labels, 20)}; the model has "
                f"{names(self._labels, 20)}, and a classifier's labels are all of them"
            )
        async with self._turn:
            labelled, errors = await asyncio.to_thread(self._classified, texts)
        if errors:
            raise RowErrors(errors, [labelled[place] for place in sorted(labelled)])
        return [labelled[place] for place in range(len(texts))]

    def _classified(
        self, texts: Sequence[str]
    ) -> tuple[dict[int, tuple[str, float]], dict[int, BaseException]]:
        lengths = [len(ids) for ids in self._tokenizer(list(texts))["input_ids"]]
        errors: dict[int, BaseException] = {
            place: PromptTooLong(f"the text has {length} tokens; the model takes {self._longest}")
            for place, length in enumerate(lengths)
            if length > self._longest
        }
        # Texts of similar length form a batch, to minimize padding.
        order = sorted(set(range(len(texts))) - set(errors), key=lambda place: lengths[place])
        made = self._pipeline([texts[place] for place in order]) if order else []
        labelled = {place: (str(one["label"]), one["score"]) for place, one in zip(order, made)}
        return labelled, errors


def _check_head(model: str, config: Any) -> None:
    """Raise ValueError for a model without a classification head, or without a single label."""
    built = config.architectures or []
    if not any(name.endswith(_HEAD) for name in built):
        raise ValueError(
            f"model {model!r} is {names(built)}; expected one that ends in {_HEAD!r}. A language "
            "model classifies by provider 'transformers' or 'vllm'"
        )
    if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"model {model!r} has num_labels={config.num_labels} and problem_type="
            f"{config.problem_type!r}; expected labels of which one fits a text"
        )
