"""Embeddings of a text column."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vane_dagster._arguments import flag, positive, text
from vane_dagster.pipeline.known_arguments import adds_stage
from vane_dagster.pipeline.model_stages import ModelStageRows, column_named
from vane_dagster.pipeline.records import Model, StageArguments, parse_options
from vane_dagster.pipeline.servers import ModelServer

if TYPE_CHECKING:
    from typing import Unpack

    from vane_dagster.pipeline.pipeline import Stage


class EmbedRows(ModelStageRows):
    """Rows that an embedding stage can read."""

    @adds_stage
    def embed(
        self,
        name: str,
        column: str,
        *,
        model: str | os.PathLike[str] | ModelServer | Model,
        provider: str | type | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        output_column: str | None = None,
        batch_size: int | None = None,
        **options: Unpack[StageArguments],
    ) -> Stage:
        """Add a stage that embeds a text column.

        The output rows have their ids, `include_columns` and a vector of 32-bit floats, as a
        fixed-size list. Without `dimensions`, the first run infers the size from the vectors of
        the first rows, and pins it in the store. Vectors of another size are refused.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            column: The text column. A null is a row error.
            model: See `prompt`.
            provider: "sentence_transformers", "vllm" or "openai"; the name of an installed
                package's provider; or a class with ``async def embed(self, texts, dimensions)``.
                Default: "openai" for a server, else "sentence_transformers".
            dimensions: The length of a vector, for models that can return shorter vectors than
                their full size. Default: the model's full size. "vllm" needs a model whose config
                allows it, or ``engine_kwargs={"hf_overrides": {"is_matryoshka": True}}``.
            normalize: Whether to scale vectors to length 1, which is the default.
            output_column: The column of vectors. Default: the stage's name.
            include_columns: Input columns to pass through; True for all.
            batch_size: Texts per call. Default: 64; for "sentence_transformers", which sorts the
                texts of a call by length, 256.
            concurrency: Workers; see `map_batches`. Default: 1, with up to 4 calls at a time.
            gpus: GPUs that a worker reserves.
            on_error: See `map_batches`.
            reuse: See `map_batches`.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
        """
        from vane_dagster.providers.embedding import EmbedTask

        location = self.pipeline._location(name)
        model_task = EmbedTask(
            text(location, "column", column, "a name"),
            column_named(location, name, output_column),
            positive(location, "dimensions", dimensions),
            flag(location, "normalize", normalize),
        )
        served = isinstance(model.name if isinstance(model, Model) else model, ModelServer)
        if provider is None and not served:
            provider = "sentence_transformers"
        parsed = parse_options(location, options)
        return self._add_model_stage(
            "embed", name, model_task, provider, model, batch_size, parsed, dimensions is None
        )
