"""Prompts over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import (
    mapping,
    positive,
)
from vane_dagster.checks.builtin import DEFAULT_ERROR_RATE
from vane_dagster.pipeline.model_stages import ModelStageRows, PromptSpec, name_of
from vane_dagster.pipeline.options import ExecutionBackend, OnError
from vane_dagster.providers.format import parse_format
from vane_dagster.providers.prompting import PromptTask
from vane_dagster.providers.template import parse_template
from vane_dagster.providers.usage import parse_budget, parse_prices

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Stage


class PromptRows(ModelStageRows):
    """Rows that a prompt stage can read."""

    def prompt(
        self,
        name: str,
        messages: str,
        *,
        provider: str | type,
        model: str,
        system: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        return_format: Any = None,
        output_column: str = "response",
        include_columns: bool | Sequence[str] = (),
        explain_errors: int = 0,
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
        prices: Mapping[str, float] | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        env_vars: Sequence[str] = (),
        keyed_env_vars: Sequence[str] = (),
        on_error: OnError = "raise",
        max_error_rate: float = DEFAULT_ERROR_RATE,
        max_retries: int = 5,
        retry_on: Sequence[type[BaseException] | str] = (),
        timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        max_batches_per_actor: int | None = None,
        **asset: Any,
    ) -> Stage:
        """Add a stage that sends a prompt for each row to a language model.

        The output rows have their ids, `include_columns`, the answer, and a struct
        ``<output_column>_usage``: requests, prompt_tokens, completion_tokens, cached_tokens,
        finish_reason, and the seconds from the first request to the answer.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            messages: A column of prompts, or of conversations (lists of structs of role and
                content); or text with ``{column}`` fields.
            provider: "openai", "transformers" or "vllm"; the name of an installed package's
                provider; or a class, see `vane_dagster.providers.base.Provider`.
            model: The model's name, as the provider knows it.
            system: The system message, placed before all others.
            sampling_params: ``temperature``, ``max_tokens``, ``top_p``, ``stop``, ``seed`` and so
                on, as in OpenAI's chat API. A value ``"{column}"`` is read from each row and
                omitted where it is null: ``{"adapter": "{tenant}"}``.
            return_format: A pydantic model or a JSON schema, for an answer that is a struct; or a
                list of choices, for an answer that is one of them. An answer that does not fit is a
                row error. The provider constrains the model to the format if it can. Default: text.
            output_column: The column of answers.
            include_columns: Input columns to pass through; True for all.
            explain_errors: How often to send a model the reason why its answer does not fit, and
                ask again.
            batch_size: Rows that are submitted together. The model processes the rows of all of a
                worker's batches concurrently. Default: 32.
            max_concurrency: Concurrent batches in one worker. Default: 16.
            concurrency: Workers, or (min, max). Default: 1.
            gpus_per_actor: GPUs that a worker reserves.
            num_cpus: CPUs that a worker reserves.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: The GPU type, as Ray names it.
            resources: Custom cluster resources that a worker reserves.
            execution_backend: "ray_actor" or "subprocess_actor"; see `map_batches`.
            provider_options: Passed to the provider; see its class. Options that cannot change
                answers, such as addresses and limits, are not part of fragment keys.
            prices: The price of a million tokens by kind: "prompt", "completion", and "cached" for
                prompt tokens that the engine has in its cache. With prices, the metadata has each
                partition's cost, including that of answers that do not fit.
            max_tokens: Token budget of a run, prompts and answers together. Once it is used up, the
                run starts no more fragments of this stage. Fragments in flight are finished and
                kept; partitions that need more fragments fail.
            max_cost: The same as a cost budget; requires `prices`.
            env_vars: Names of environment variables, such as that of an API key. Their values are
                sent to the workers with each run, and never stored, keyed or logged.
            keyed_env_vars: Environment variables with values that count in fragment keys; see
                `map_batches`.
            on_error: See `map_batches`. A failed row does not lose the answers of other rows.
            max_error_rate: See `map_batches`.
            max_retries: Retries of a row after a transient error.
            retry_on: See `map_batches`. With "InvalidAnswer", a row with an answer that does not
                fit is retried with the same request.
            timeout_s: Time limit of a batch in seconds.
            startup_timeout_s: See `map_batches`.
            max_batches_per_actor: See `map_batches`.
            **asset: Arguments of `dg.AssetSpec`; see `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid, or a field names no column.
        """
        location = self.pipeline._location(name)
        explain = 0 if explain_errors == 0 else positive(location, "explain_errors", explain_errors)
        model_task = PromptTask(
            parse_template(location, messages, system),
            name_of(location, output_column),
            mapping(location, "sampling_params", sampling_params),
            parse_format(location, return_format),
            explain,
        )
        priced = parse_prices(location, prices)
        own = {
            "prices": priced,
            "max_tokens": positive(location, "max_tokens", max_tokens),
            "max_cost": parse_budget(location, max_cost, priced),
        }
        return self._add_model_stage(
            PromptSpec,
            name,
            model_task,
            own,
            provider=provider,
            model=model,
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
            **asset,
        )
