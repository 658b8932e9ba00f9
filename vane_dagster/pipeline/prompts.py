"""Prompts over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vane_dagster._arguments import list_of_names, mapping, positive
from vane_dagster._keywords import require_columns
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.model_stages import ModelStageRows, PromptSpec, name_of
from vane_dagster.pipeline.options import ExecutionBackend, OnError, ReuseMode
from vane_dagster.pipeline.prompt_functions import made_columns, parse_functions
from vane_dagster.pipeline.required_arguments import required_arguments
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.pipeline.specs import declares_columns
from vane_dagster.providers.format import parse_format
from vane_dagster.providers.prompting import PromptTask
from vane_dagster.providers.row_functions import RowFunctions
from vane_dagster.providers.template import Template, parse_system, parse_template
from vane_dagster.providers.usage import parse_budget, parse_prices
from vane_dagster.types.schema import SchemaLike

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Stage


class PromptRows(ModelStageRows):
    """Rows that a prompt stage can read."""

    @required_arguments(either=("model", "server"))
    def prompt(
        self,
        name: str,
        messages: str | None = None,
        *,
        provider: str | type,
        model: str | None = None,
        server: ModelServer | None = None,
        system: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        return_format: Any = None,
        output_column: str = "response",
        include_columns: bool | Sequence[str] = (),
        explain_errors: int = 0,
        preprocess: Callable[[dict[str, Any]], Any] | None = None,
        postprocess: Callable[[dict[str, Any]], Any] | None = None,
        schema: SchemaLike | None = None,
        columns: Sequence[str] | None = None,
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
        """Add a stage that sends a prompt for each row to a language model.

        The output rows have their ids, `include_columns`, the answer, and a struct
        ``<output_column>_usage``: requests, prompt_tokens, completion_tokens, cached_tokens,
        finish_reason, and the seconds from the first request to the answer.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            messages: A column of prompts, or of conversations (lists of structs of role and
                content); or text with ``{column}`` fields. Default: the column with the
                name of the stage, unless `preprocess` makes the prompts.
            provider: "anthropic", "openai", "transformers" or "vllm"; the name of an installed
                package's provider; or a class, see `vane_dagster.providers.base.Provider`.
            model: The model's name, as the provider knows it. Default: that of `server`.
            server: A server of the pipeline that runs the model, such as `vd.VLLMServer`, for the
                provider "openai". Its replicas get the requests, on the worker's node first.
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
            preprocess: A function that gets a row as a dict, and returns its prompt: text; a list
                of messages; or a dict with ``messages`` or ``prompt``, or with fields of the
                template if there is one, and optionally the row's own ``sampling_params``. Its
                errors are those of the row.
            postprocess: A function that gets a row as a dict, with what `preprocess` added, the
                answer as `output_column`, and its text as ``generated_text``. It returns a dict (or
                dataclass, named tuple, pydantic model) of the columns in `schema`, which replace
                the answer in the output; other fields of the row are dropped. Its errors are those
                of the row, whose tokens are counted.
            schema: The columns that `postprocess` makes; see `map_batches`. Default: the fields of
                its return annotation.
            columns: The input columns that these functions get, besides those of the template; see
                `map_batches`. With `preprocess`, all columns of the template too that it does not
                make. Default: all.
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
            reuse: See `map_batches`.
            reuse_partitions: See `map_batches`.
            per_row: See `map_batches`. Default: True unless ``temperature`` is 0, so that ten equal
                prompts get ten answers.
            **asset: Arguments of `dg.AssetSpec`; see `project`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid, or a field names no column.
            SchemaError: If a type is unknown.
        """
        location = self.pipeline._location(name)
        explain = 0 if explain_errors == 0 else positive(location, "explain_errors", explain_errors)
        functions = parse_functions(location, preprocess, postprocess)
        template, made, read = self._parse_rows(name, messages, system, functions, schema, columns)
        model_task = PromptTask(
            template,
            name_of(location, output_column),
            mapping(location, "sampling_params", sampling_params),
            parse_format(location, return_format),
            explain,
            functions,
            read,
            made,
            self.pipeline.keys(self._node)[0].column,
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
            per_row=not model_task.is_greedy if per_row is None else per_row,
            **asset,
        )

    def _parse_rows(
        self,
        name: str,
        messages: Any,
        system: Any,
        functions: RowFunctions,
        schema: Any,
        columns: Any,
    ) -> tuple[Template, pa.Schema | None, tuple[str, ...] | None]:
        """Return the template, the columns that are made of answers, and those that are read."""
        location = self.pipeline._location(name)
        if messages is not None:
            template = parse_template(location, messages, system)
        elif functions.preprocess is not None:
            template = Template("", (), False, parse_system(location, system))
        else:
            declared = declares_columns(self.pipeline, self._node)
            known = self.pipeline.declared_types()[self._node] if declared else [name]
            owner = f"{location}: messages is missing, and {self._node!r}"
            fix = "Name the column of prompts, write a template, or give preprocess"
            require_columns(owner, [name], known, DefinitionError, fix)
            template = Template(name, (name,), True, parse_system(location, system))
        if functions.postprocess is None and schema is not None:
            raise DefinitionError(
                f"{location}: schema declares what postprocess makes, and there is none; leave it "
                "out, or use return_format for the type of the answer"
            )
        if columns is not None and not functions.given:
            raise DefinitionError(
                f"{location}: columns are what preprocess and postprocess get, and there is "
                "neither; to pass columns through, name them in include_columns"
            )
        made = None
        if functions.postprocess is not None:
            made = made_columns(location, functions.postprocess, schema)
        read = list_of_names(location, "columns", columns) if functions.given else ()
        return template, made, read
