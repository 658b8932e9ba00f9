"""Labels for texts, by a language model or by a classifier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import list_of_names
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.model_stages import ModelStageSpec, name_of
from vane_dagster.pipeline.prompts import PromptRows
from vane_dagster.providers.labelling import ClassifyTask
from vane_dagster.providers.registry import answers

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Stage


@dataclass(frozen=True)
class LabelSpec(ModelStageSpec):
    """A column's labels by a classifier, whose recipe is a `ClassifyTask`."""

    kind = "classify"


class LabelRows(PromptRows):
    """Rows whose texts can be given labels."""

    def classify(
        self,
        name: str,
        column: str,
        labels: Sequence[str] | Mapping[str, str],
        *,
        provider: str | type,
        model: str,
        output_column: str = "label",
        **options: Any,
    ) -> Stage:
        """Adds a stage that gives each text one of some labels.

        A language model is asked for the label that fits best, and held to the labels where its
        provider can; rows come out as those of `prompt` do.

        A classifier has learnt its labels: provider "transformers_classifier", with a model for
        sequence classification of transformers, or a class with
        ``async def classify(self, texts, labels)``. Rows come out with their ids,
        `include_columns`, the label, and how sure the model is of it: a DOUBLE
        ``<output_column>_score`` between 0 and 1. A text that is too long for the model is an error
        of its row.

        Args:
            name: The stage's name.
            column: The column of texts.
            labels: The labels; or label to what it means, for a language model to read. A
                classifier's have to be all that it knows, in any order.
            provider: See `prompt`; or a classifier's.
            model: See `prompt`.
            output_column: The column of labels.
            **options: Further arguments of `prompt`; of a classifier those of `embed`.

        Raises:
            DefinitionError: If an argument does not fit.
        """
        location = self.pipeline._location(name)
        name_of(location, column, "column")
        if not isinstance(labels, (Sequence, Mapping)) or isinstance(labels, str) or not labels:
            raise DefinitionError(
                f"{location}: labels is {labels!r}; expected a list of labels, or label to meaning"
            )
        given: dict[str, Any] = {"provider": provider, "model": model, **options}
        given["output_column"] = output_column
        if answers(location, provider, ClassifyTask.method):
            return self._classified(name, column, labels, **given)
        told = labels.items() if isinstance(labels, Mapping) else ((label, "") for label in labels)
        lines = [f"- {label}: {meaning}" if meaning else f"- {label}" for label, meaning in told]
        listed = "\n".join(lines).replace("{", "{{").replace("}", "}}")
        messages = (
            "Which of these labels fits the text best? Answer with the label alone.\n\n"
            f"{listed}\n\nText: {{{column}}}"
        )
        given = {"sampling_params": {"temperature": 0, "max_tokens": 64}, **given}
        return self.prompt(name, messages, return_format=list(labels), **given)

    def _classified(
        self,
        name: str,
        column: str,
        labels: Collection[str],
        *,
        output_column: str,
        include_columns: Sequence[str] = (),
        **options: Any,
    ) -> Stage:
        """Adds a stage by a classifier; `options` are those of `_add_model_stage`."""
        location = self.pipeline._location(name)
        listed = list_of_names(location, "labels", [*labels]) or ()
        if len(set(listed)) < len(listed):
            raise DefinitionError(f"{location}: labels has one twice: {listed}")
        carried = tuple(list_of_names(location, "include_columns", include_columns) or ())
        model_task = ClassifyTask(column, name_of(location, output_column), carried, listed)
        return self._add_model_stage(LabelSpec, name, model_task, {}, **options)
