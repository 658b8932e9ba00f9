"""Labels of a column of texts, by a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vane_dagster.errors import RowErrors, names
from vane_dagster.providers.texts import TextTask


@dataclass(frozen=True)
class ClassifyTask(TextTask):
    """What a stage of a classifier asks of each row.

    Attributes:
        labels: The labels; `output` is their column, and that of scores is named after it.
    """

    labels: tuple[str, ...] = ()

    method = "classify"

    @property
    def schema(self) -> pa.Schema:
        """The label, and how sure the model is of it."""
        return pa.schema({self.output: pa.string(), f"{self.output}_score": pa.float64()})

    @property
    def keyed(self) -> Mapping[str, Any]:
        """See `ModelTask`."""
        return {
            "column": self.column,
            "output_column": self.output,
            "labels": self.labels,
            "include_columns": self.carried,
        }

    def describe(self, model: str) -> str:
        """See `ModelTask`."""
        return f"Column `{self.column}` is given one of {names(self.labels, 20)} by {model}"

    async def query(self, provider: Any, texts: list[str]) -> Sequence[tuple[str, float]]:
        """A label and a score for each text."""
        return self._known(await provider.classify(texts, self.labels))

    def _known(self, found: Sequence[tuple[str, float]]) -> Sequence[tuple[str, float]]:
        """Labels that the classifier gave; one that is none of the stage's is an error."""
        wrong: dict[int, BaseException] = {
            place: ValueError(f"the label is {label!r}; expected one of {names(self.labels, 20)}")
            for place, (label, _) in enumerate(found)
            if label not in self.labels
        }
        if wrong:
            raise RowErrors(wrong, [one for place, one in enumerate(found) if place not in wrong])
        return found

    def made(self, found: Sequence[tuple[str, float]]) -> dict[str, Any]:
        """The columns of labels and scores."""
        label, score = self.schema
        return {
            label.name: pa.array([name for name, _ in found], label.type),
            score.name: pa.array([float(sure) for _, sure in found], score.type),
        }
