"""Labels for texts, from a language model or a classifier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import list_of_names
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.asset_options import check_arguments
from vane_dagster.pipeline.foreign_arguments import StageCall, stage_call
from vane_dagster.pipeline.model_stages import ModelStageSpec, constructor_options, name_of
from vane_dagster.pipeline.prompts import PromptRows
from vane_dagster.pipeline.required_arguments import required_arguments
from vane_dagster.providers.labelling import LABEL_SAMPLING, ClassifyTask, label_prompt
from vane_dagster.providers.prompting import PromptTask
from vane_dagster.providers.registry import answers, provider_class

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Stage


@dataclass(frozen=True)
class LabelSpec(ModelStageSpec):
    """A stage that labels a column by a classifier. Its model task is a `ClassifyTask`."""

    kind = "classify"


class LabelRows(PromptRows):
    """Rows that a classification stage can read."""

    @required_arguments("prompt")
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
        """Add a stage that assigns one of the given labels to each text.

        A language model is asked for the label that fits best, and constrained to the labels if its
        provider supports that. The output rows are those of `prompt`.

        A classifier is trained on its labels. Use provider "transformers_classifier" with a
        transformers model for sequence classification, or a class with
        ``async def classify(self, texts, labels)``. The output rows have their ids,
        `include_columns`, the label, and the model's confidence: a DOUBLE
        ``<output_column>_score`` between 0 and 1. A text that is too long for the model is a row
        error.

        Args:
            name: The stage's name.
            column: The text column.
            labels: The labels; or a mapping of label to description, for a language model to read.
                For a classifier, exactly the labels of the model, in any order.
            provider: A provider of `prompt`, or a classifier.
            model: See `prompt`.
            output_column: The column of labels.
            **options: Further arguments of `prompt`; for a classifier, of `embed`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
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
        check_arguments(location, options, self._classify_call(location, provider))
        given = {"sampling_params": LABEL_SAMPLING, **given}
        prompt = label_prompt(column, labels)
        return self.prompt(name, prompt, return_format=list(labels), **given)

    def _classify_call(self, location: str, provider: str | type) -> StageCall:
        """Describe the call of `classify` with a language model, whose format is the labels."""
        takes = constructor_options(provider_class(location, provider, PromptTask.method))
        nested = {"provider_options": [each.name for each in takes]}
        call = stage_call(self.classify, self.prompt, nested=nested)
        return replace(
            call, options=tuple(each for each in call.options if each != "return_format")
        )

    def _classified(
        self,
        name: str,
        column: str,
        labels: Collection[str],
        *,
        output_column: str,
        **options: Any,
    ) -> Stage:
        """Add a stage that runs a classifier; `options` are those of `_add_model_stage`."""
        location = self.pipeline._location(name)
        listed = list_of_names(location, "labels", [*labels]) or ()
        if len(set(listed)) < len(listed):
            raise DefinitionError(f"{location}: labels has one twice: {listed}")
        model_task = ClassifyTask(column, name_of(location, output_column), listed)
        return self._add_model_stage(LabelSpec, name, model_task, {}, **options)
