"""Labels for texts, from a language model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import list_of_names, text, unexpected
from vane_dagster.pipeline.known_arguments import adds_stage
from vane_dagster.pipeline.prompts import PromptRows
from vane_dagster.pipeline.records import Model, StageArguments
from vane_dagster.pipeline.servers import ModelServer

if TYPE_CHECKING:
    from typing import Unpack

    from vane_dagster.pipeline.pipeline import Stage


class LabelRows(PromptRows):
    """Rows that a classification stage can read."""

    @adds_stage
    def classify(
        self,
        name: str,
        column: str,
        labels: Sequence[str] | Mapping[str, str],
        *,
        model: str | os.PathLike[str] | ModelServer | Model,
        provider: str | type | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        output_column: str | None = None,
        batch_size: int | None = None,
        **options: Unpack[StageArguments],
    ) -> Stage:
        """Add a stage that assigns one of the given labels to each text.

        A language model is asked for the label that fits best, and constrained to the labels if its
        provider supports that. The output rows are those of `prompt`.

        For a model that was trained on the labels, write a class for `map_batches`, which calls for
        example ``transformers.pipeline("text-classification")``.

        Args:
            name: The stage's name.
            column: The text column.
            labels: The labels; or a mapping of label to description, for the model to read.
            model: See `prompt`.
            provider: See `prompt`.
            sampling_params: See `prompt`. Default: a temperature of 0.
            output_column: The column of labels. Default: the stage's name.
            include_columns: Input columns to pass through; True for all.
            batch_size: See `prompt`.
            concurrency: Workers; see `prompt`.
            gpus: GPUs that a worker reserves.
            on_error: See `map_batches`.
            reuse: See `map_batches`.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
        """
        from vane_dagster.providers.labelling import LABEL_SAMPLING, label_prompt

        location = self.pipeline._location(name)
        text(location, "column", column, "a name")
        listed = list_of_names(
            location, "labels", [*labels] if isinstance(labels, Mapping) else labels
        )
        if not listed or len(set(listed)) < len(listed):
            raise unexpected(location, "labels", labels, "different labels, or label to meaning")
        return self.prompt(
            name,
            label_prompt(column, labels),
            model=model,
            provider=provider,
            sampling_params=LABEL_SAMPLING if sampling_params is None else sampling_params,
            return_format=listed,
            output_column=output_column,
            batch_size=batch_size,
            **options,
        )
