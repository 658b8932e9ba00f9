"""Labels of a text column, from a classifier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster.errors import names
from vane_dagster.providers.texts import TextTask

LABEL_SAMPLING = {"temperature": 0, "max_tokens": 64}
"""Sampling parameters of a language model that chooses labels; part of fragment keys."""


def label_prompt(column: str, labels: Collection[str] | Mapping[str, str]) -> str:
    """The template by which a language model chooses a label; it is part of fragment keys."""
    meanings = labels.items() if isinstance(labels, Mapping) else ((label, "") for label in labels)
    lines = [f"- {label}: {meaning}" if meaning else f"- {label}" for label, meaning in meanings]
    listed = "\n".join(lines).replace("{", "{{").replace("}", "}}")
    return (
        "Which of these labels fits the text best? Answer with the label alone.\n\n"
        f"{listed}\n\nText: {{{column}}}"
    )


@dataclass(frozen=True)
class ClassifyTask(TextTask):
    """The model task of a stage with a classifier.

    Attributes:
        labels: The labels. `output` is their column, and the column of scores is named after it.
    """

    labels: tuple[str, ...] = ()

    method = "classify"

    @property
    def schema(self) -> pa.Schema:
        """The label, and the model's confidence."""
        return pa.schema({self.output: pa.string(), f"{self.output}_score": pa.float64()})

    def describe(self, model: str) -> str:
        """Describe the request to a model, for users."""
        return f"Column `{self.column}` is given one of {names(self.labels, 20)} by {model}"

    async def query(self, provider: Any, texts: list[str]) -> Sequence[tuple[str, float]]:
        """Return a label and a score for each text."""
        labelled: Sequence[tuple[str, float]] = await provider.classify(texts, self.labels)
        return labelled

    def refused(self, answers: Sequence[tuple[str, float]]) -> Mapping[int, BaseException]:
        """Return the errors of labels that are unknown."""
        return {
            place: ValueError(f"the label is {label!r}; expected one of {names(self.labels, 20)}")
            for place, (label, _) in enumerate(answers)
            if label not in self.labels
        }

    def made(self, answers: Sequence[tuple[str, float]]) -> dict[str, Any]:
        """Return the columns of labels and scores."""
        label, score = self.schema
        return {
            label.name: pa.array([name for name, _ in answers], label.type),
            score.name: pa.array([float(sure) for _, sure in answers], score.type),
        }
