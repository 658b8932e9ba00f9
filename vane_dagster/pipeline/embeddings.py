"""Embeddings of a text column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import positive
from vane_dagster.pipeline.model_stages import EmbedSpec, ModelStageRows, name_of
from vane_dagster.pipeline.options import ExecutionBackend, OnError, ReuseMode
from vane_dagster.pipeline.required_arguments import required_arguments
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.providers.embedding import EmbedTask

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Stage


class EmbedRows(ModelStageRows):
    """Rows that an embedding stage can read."""

    @required_arguments(either=("model", "server"))
    def embed(
        self,
        name: str,
        column: str,
        *,
        provider: str | type = "sentence_transformers",
        model: str | None = None,
        server: ModelServer | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        output_column: str = "embedding",
        include_columns: bool | Sequence[str] = (),
        batch_size: int | None = None,
        max_concurrency: int | None = None,
        concurrency: int | tuple[int, int] | None = None,
        gpus_per_actor: float = 0,
        num_cpus: float = 0,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        execution_backend: ExecutionBackend | None = None,
        provider_options: Mapping[str, Any] | None = None,
        env_vars: Sequence[str] = (),
        keyed_env_vars: Sequence[str] = (),
        on_error: OnError = "raise",
        max_error_rate: float | None = None,
        max_retries: int = 5,
        retry_on: Sequence[type[BaseException] | str] = (),
        timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        max_batches_per_actor: int | None = None,
        reuse: ReuseMode | None = None,
        reuse_partitions: int = 1,
        per_row: bool | None = None,
        **asset: Any,
    ) -> Stage:
        """Add a stage that embeds a text column.

        The output rows have their ids, `include_columns` and a vector of 32-bit floats, as a
        fixed-size list. Without `dimensions`, the first run infers the size from the vectors of
        the first rows, and pins it in the store. Vectors of another size are refused.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            column: The text column. A null is a row error.
            provider: "sentence_transformers", "vllm" or "openai"; the name of an installed
                package's provider; or a class with ``async def embed(self, texts, dimensions)``.
            model: The model's name, as the provider knows it. Default: that of `server`.
            server: A server of the pipeline that runs the model, such as `vd.VLLMServer`, for the
                provider "openai". Its replicas get the requests, on the worker's node first.
            dimensions: The length of a vector, for models that can return shorter vectors than
                their full size. Default: the model's full size.
            normalize: Whether to scale vectors to length 1.
            output_column: The column of vectors.
            include_columns: Input columns to pass through; True for all.
            batch_size: Texts per call. Default: 64.
            max_concurrency: Concurrent calls in one worker. Default: 4.
            concurrency: See `prompt`.
            gpus_per_actor: GPUs that a worker reserves.
            num_cpus: CPUs that a worker reserves.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: The GPU type, as Ray names it.
            resources: Custom cluster resources that a worker reserves.
            execution_backend: "ray_actor" or "subprocess_actor"; see `map_batches`.
            provider_options: Passed to the provider.
            env_vars: Names of environment variables that are sent to the workers.
            keyed_env_vars: Environment variables with values that count in fragment keys; see
                `map_batches`.
            on_error: See `map_batches`.
            max_error_rate: See `map_batches`.
            max_retries: See `map_batches`.
            retry_on: See `map_batches`.
            timeout_s: Time limit of a call in seconds.
            startup_timeout_s: See `map_batches`.
            max_batches_per_actor: See `map_batches`.
            reuse: See `map_batches`.
            reuse_partitions: See `map_batches`.
            per_row: See `map_batches`.
            **asset: Arguments of `dg.AssetSpec`; see `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
        """
        location = self.pipeline._location(name)
        model_task = EmbedTask(
            name_of(location, column, "column"),
            name_of(location, output_column),
            positive(location, "dimensions", dimensions),
            bool(normalize),
        )
        return self._add_model_stage(
            EmbedSpec,
            name,
            model_task,
            {"infers": dimensions is None},
            provider=provider,
            model=model,
            server=server,
            include_columns=include_columns,
            provider_options=provider_options,
            batch_size=batch_size,
            max_concurrency=max_concurrency,
            concurrency=concurrency,
            gpus_per_actor=gpus_per_actor,
            num_cpus=num_cpus,
            memory=memory,
            accelerator_type=accelerator_type,
            resources=resources,
            execution_backend=execution_backend,
            env_vars=env_vars,
            keyed_env_vars=keyed_env_vars,
            on_error=on_error,
            max_error_rate=max_error_rate,
            max_retries=max_retries,
            retry_on=retry_on,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            max_batches_per_actor=max_batches_per_actor,
            reuse=reuse,
            reuse_partitions=reuse_partitions,
            per_row=per_row,
            **asset,
        )
