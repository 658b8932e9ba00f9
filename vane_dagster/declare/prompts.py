"""Prompt stages: a map whose model is a provider's, with a recipe for each row's messages."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vane_dagster.declare.arguments import (
    list_of_names,
    mapping,
    one_of,
    parse_concurrency,
    positive,
)
from vane_dagster.declare.checks import DEFAULT_ERROR_RATE
from vane_dagster.declare.failures import parse_failures
from vane_dagster.declare.stage import (
    SOURCE,
    MapBatchesSpec,
    OnError,
    ProjectSpec,
    Resources,
    asset_options,
)
from vane_dagster.declare.table import known_columns
from vane_dagster.declare.udf import Udf
from vane_dagster.declare.upkeep import parse_upkeep
from vane_dagster.errors import DefinitionError, names
from vane_dagster.masking import keep_arguments
from vane_dagster.providers.format import parse_format
from vane_dagster.providers.prompter import USAGE, Prompt, Prompter
from vane_dagster.providers.registry import provider_class
from vane_dagster.providers.template import Template, parse_template

if TYPE_CHECKING:
    from vane_dagster.declare.pipeline import Pipeline, Stage

_DEFAULT_BATCH = 32


@dataclass(frozen=True)
class PromptSpec(MapBatchesSpec):
    """A prompt over rows.

    Attributes:
        provider: The provider's class.
        model: The model's name.
        options: What the provider is given that may change answers.
        prompt: The recipe.
    """

    provider: Any = None
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prompt: Prompt = field(default_factory=lambda: Prompt(Template("", (), True), "response"))

    kind = "prompt"


class PromptRows:
    """What rows can be asked of a language model."""

    pipeline: Pipeline
    _node: str

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
        include_columns: Sequence[str] = (),
        explain_errors: int = 0,
        batch_size: int | None = None,
        max_concurrency: int = 16,
        concurrency: int | tuple[int, int] | None = None,
        gpus_per_actor: float = 0,
        num_cpus: float = 0,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
        provider_options: Mapping[str, Any] | None = None,
        env_vars: Sequence[str] = (),
        on_error: OnError = "raise",
        max_error_rate: float = DEFAULT_ERROR_RATE,
        max_retries: int = 5,
        retry_on: Sequence[type[BaseException] | str] = (),
        timeout_s: float | None = None,
        startup_timeout_s: float | None = None,
        max_batches_per_actor: int | None = None,
        **asset: Any,
    ) -> Stage:
        """Adds a stage that asks a language model about each row.

        Rows come out with their ids, `include_columns`, the answer, and a struct
        ``<output_column>_usage``: prompt_tokens, completion_tokens, cached_tokens, finish_reason,
        and the seconds from submission to answer.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            messages: A column of prompts, or of conversations (lists of structs of role and
                content); or text with ``{column}`` fields.
            provider: "openai", "transformers" or "vllm"; the name of an installed package's
                provider; or a class, see `vane_dagster.providers.base.Provider`.
            model: The model's name, as the provider knows it.
            system: The system message, before all others.
            sampling_params: ``temperature``, ``max_tokens``, ``top_p``, ``stop``, ``seed`` and so
                on, as in OpenAI's chat API.
            return_format: A pydantic model or a JSON schema, and the answer is a struct; a list of
                choices, and it is one of them. One that does not fit is an error of its row. The
                provider holds the model to it where it can. Default: text.
            output_column: The column of answers.
            include_columns: Columns that are passed on.
            explain_errors: How often a model is told why its answer does not fit, and asked again.
            batch_size: Rows that are submitted together; all rows of a worker's batches are with
                the model at the same time. Default: 32.
            max_concurrency: Batches at the same time in one worker.
            concurrency: Workers, or (min, max). Default: 1.
            gpus_per_actor: GPUs that a worker reserves.
            num_cpus: CPUs that a worker reserves.
            memory: Bytes of memory that a worker reserves.
            accelerator_type: Kind of GPU, as Ray names it.
            resources: Custom resources of the cluster that a worker reserves.
            provider_options: Passed to the provider; see its class. Those that can't change
                answers, as addresses and limits, are no part of fragment keys.
            env_vars: Names of environment variables, as that of an API key, whose values go to
                the workers with each run; never stored, keyed or logged.
            on_error: See `map_batches`; a row that fails costs no other row's answer.
            max_error_rate: See `map_batches`.
            max_retries: How often a row is asked again after an error that may pass.
            retry_on: See `map_batches`.
            timeout_s: Seconds that a batch may take.
            startup_timeout_s: See `map_batches`.
            max_batches_per_actor: See `map_batches`.
            **asset: What `dg.AssetSpec` takes; see `project`.

        Raises:
            DefinitionError: If an argument does not fit, or a field is no column.
        """
        culprit = self.pipeline._culprit(name)
        template = parse_template(culprit, messages, system)
        carried = list_of_names(culprit, "include_columns", include_columns) or ()
        self._check_columns(culprit, (*template.fields, *carried))
        found, options = (
            provider_class(culprit, provider),
            mapping(culprit, "provider_options", provider_options),
        )
        if not isinstance(model, str) or not model:
            raise DefinitionError(f"{culprit}: model is {model!r}; expected a model's name")
        if not isinstance(output_column, str) or not output_column:
            raise DefinitionError(f"{culprit}: output_column is {output_column!r}; expected a name")
        form = parse_format(culprit, return_format)
        sampling = mapping(culprit, "sampling_params", sampling_params)
        explain = 0 if explain_errors == 0 else positive(culprit, "explain_errors", explain_errors)
        recipe = Prompt(template, output_column, sampling, form, tuple(carried), explain)
        arguments = {"model": model, "options": options}
        keep_arguments((), arguments)
        needs = Resources(
            num_cpus,
            gpus_per_actor,
            memory,
            accelerator_type,
            mapping(culprit, "resources", resources),
        )
        needs.validate(culprit)
        workers = parse_concurrency(culprit, concurrency) or (1, 1)
        answers = [pa.field(output_column, form.type), pa.field(recipe.usage, USAGE)]
        operational = getattr(found, "OPERATIONAL", ())
        return self.pipeline._add(
            PromptSpec(
                name=name,
                upstream=(self._node,),
                asset=asset_options(culprit, asset),
                udf=Udf(
                    target=functools.partial(Prompter, found),
                    stateful=True,
                    style="async",
                    kwargs={"prompt": recipe, "workers": workers[1]},
                    constructor_kwargs=arguments,
                    label=f"{found.__name__}({model!r})",
                ),
                schema=pa.schema(answers),
                columns=tuple(dict.fromkeys((*template.fields, *carried))),
                batch_format="pyarrow",
                batch_size=positive(culprit, "batch_size", batch_size, _DEFAULT_BATCH),
                auto_batch=False,
                cardinality="one_to_one",
                concurrency=workers,
                max_concurrency=positive(culprit, "max_concurrency", max_concurrency, 16),
                resources=needs,
                env_vars=list_of_names(culprit, "env_vars", env_vars) or (),
                failures=parse_failures(
                    culprit,
                    one_of(culprit, "on_error", on_error, ("raise", "quarantine", "null")),
                    max_error_rate,
                    max_retries,
                    retry_on,
                    timeout_s,
                ),
                upkeep=parse_upkeep(culprit, startup_timeout_s, max_batches_per_actor, None),
                carried=tuple(carried),
                provider=found,
                model=model,
                options=_keyed(options, operational),
                prompt=recipe,
            )
        )

    def _check_columns(self, culprit: str, wanted: Sequence[str]) -> None:
        """Raises DefinitionError for a column that the stage above is known not to have."""
        if self._node == SOURCE:
            return
        spec = self.pipeline[self._node].spec
        if not isinstance(spec, (ProjectSpec, MapBatchesSpec)):
            return
        known = known_columns(self.pipeline, self._node)
        if missing := [column for column in wanted if column not in known]:
            raise DefinitionError(
                f"{culprit}: needs {names(missing)}, which {self._node!r} does not have; it has "
                f"{names(known, 20)}"
            )


def _keyed(
    options: Mapping[str, Any], operational: Collection[str], above: str = ""
) -> dict[str, Any]:
    """The options that may change answers, those within options too: ``"option.name"``."""
    return {
        name: _keyed(value, operational, f"{above}{name}.") if isinstance(value, Mapping) else value
        for name, value in options.items()
        if f"{above}{name}" not in operational
    }
