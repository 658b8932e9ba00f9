"""Prompts over rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import list_of_names, mapping
from vane_dagster._worker_process import is_worker
from vane_dagster.errors import DefinitionError
from vane_dagster.fingerprint.local_file import check_local_files, local_file
from vane_dagster.pipeline.known_arguments import adds_stage
from vane_dagster.pipeline.model_stages import ModelStageRows, column_named
from vane_dagster.pipeline.records import Model, StageArguments, parse_options
from vane_dagster.pipeline.servers import ModelServer

if TYPE_CHECKING:
    from typing import Unpack

    from vane_dagster.pipeline.pipeline import Stage
    from vane_dagster.providers.content import Content


_ADAPTER = "adapter_config.json"
"""A file that the folder of each adapter has."""


class PromptRows(ModelStageRows):
    """Rows that a prompt stage can read."""

    @adds_stage
    def prompt(
        self,
        name: str,
        messages: str
        | Sequence[str | Content]
        | Sequence[Mapping[str, Any]]
        | Callable[[dict[str, Any]], Any],
        *,
        model: str | os.PathLike[str] | ModelServer | Model,
        provider: str | type | None = None,
        system: str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        return_format: Any = None,
        columns: Sequence[str] | None = None,
        output_column: str | None = None,
        batch_size: int | None = None,
        **options: Unpack[StageArguments],
    ) -> Stage:
        """Add a stage that sends a prompt for each row to a language model.

        The output rows have their ids, `include_columns`, the answer, and a struct
        ``<output_column>_usage``: requests, prompt_tokens, completion_tokens, cached_tokens,
        finish_reason, the seconds from the first request to the answer, batch_requests and
        reasoning_tokens. With `include_reasoning` of the model, they also have the text
        ``<output_column>_reasoning``.

        A refusal, a content filter, and an answer that was cut before its first word are row
        errors, `InvalidAnswer`, whose tokens count. Prompts with a common beginning are submitted
        one after another, and to the same engine if possible, so that its prefix cache has them.

        Args:
            name: The stage's name; its asset is ``<pipeline>/<name>``.
            messages: A column of prompts, or of conversations (lists of structs of role and
                content); text with ``{column}`` fields; a list of such texts and of images, sounds
                and documents, such as ``["What is this?", vd.image("picture")]``; a list of
                messages, each a dict of role and content, whose content is such a text or list; or
                a function that gets a row as a dict and returns its prompt: text; a list of
                messages; or a dict with ``messages`` or ``prompt``, and optionally the row's
                own ``sampling_params``. If it raises, the row fails. It runs in the
                model's worker, between requests, so keep it short. An edit of it keeps the model
                loaded, unless it imports a module of yours when it is called, or refers to an
                object that cannot be pickled or to more than 256 KiB of data.
            model: The provider's name of the model, or the path of its folder; a server that runs
                it, such as `vd.VLLMServer`; or `vd.Model`, with the provider's options, prices and
                budgets.
            provider: "anthropic", "openai", "transformers" or "vllm"; the name of an installed
                package's provider; or a class, see `vane_dagster.providers.base.Provider`. Default:
                "openai" for a server.
            system: The system message, placed before all others.
            sampling_params: ``temperature``, ``max_tokens``, ``top_p``, ``stop``, ``seed`` and so
                on, as in OpenAI's chat API.
            return_format: A pydantic model or a JSON schema, for an answer that is a struct; or a
                list of choices, for an answer that is one of them. An answer that does not fit is a
                row error. The provider constrains the model to the format if it can. Default: text.
            columns: The input columns that a function of `messages` receives; see `map_batches`.
                Default: all.
            output_column: The column of answers. Default: the stage's name.
            include_columns: Input columns to pass through; True for all.
            batch_size: Rows of a batch. Default: 32. A worker has `batch_size` times
                `max_concurrency` requests in flight, where `max_concurrency` of `vd.Workers` is 16
                by default. When one is answered, the next begins. An endpoint receives at most
                ``max_connections`` of them at a time, an option of `vd.Model`, by default 64.
            concurrency: Workers; see `map_batches`. Default: 1.
            gpus: GPUs that a worker reserves.
            on_error: See `map_batches`. A failed row does not lose the answers of other rows.
            reuse: See `map_batches`. Equal prompts share an answer if the temperature is 0.
            asset: See `map_batches`.

        Returns:
            The new stage.

        Raises:
            DefinitionError: If an argument is invalid.
        """
        from vane_dagster.pipeline.prompt_functions import DeclaredFormat, prompt_function
        from vane_dagster.providers.format import parse_format
        from vane_dagster.providers.prompting import PromptTask
        from vane_dagster.providers.template import Template, parse_system, parse_template
        from vane_dagster.sources.file import read_listed

        location = self.pipeline._location(name)
        function = messages if callable(messages) else None
        if columns is not None and function is None:
            raise DefinitionError(
                f"{location}: columns is only for a function that makes the prompt; to pass "
                "columns through, name them in include_columns"
            )
        parsed = parse_options(location, options)
        model_task = PromptTask(
            Template(system=parse_system(location, system))
            if callable(messages)
            else parse_template(location, messages, system),
            column_named(location, name, output_column),
            mapping(location, "sampling_params", sampling_params),
            DeclaredFormat(**vars(parse_format(location, return_format))),
            parsed.failures.explain_errors,
            None if function is None else prompt_function(location, function),
            () if function is None else list_of_names(location, "columns", columns),
            self.pipeline._key_columns(self._node)[0],
            read_listed,
            None,
            *_adapters(location, model, bool(parsed.asset.deps)),
            isinstance(model, Model) and model.include_reasoning,
        )
        if parsed.reuse.per_row is None:
            per_row = not model_task.is_greedy
            parsed = replace(parsed, reuse=replace(parsed.reuse, per_row=per_row))
        return self._add_model_stage(
            "prompt", name, model_task, provider, model, batch_size, parsed
        )


def _adapters(location: str, model: Any, made_later: bool) -> tuple[Any, str]:
    """Return the adapter of a model, and ""; or all that rows may name, and their column."""
    from vane_dagster.providers.template import single_column

    folder = model.adapter if isinstance(model, Model) else None
    if folder is None:
        return None, ""
    parent, name = os.path.split(os.fspath(folder).rstrip(os.sep))
    if (column := single_column(name)) is None:
        check_local_files(location, [local_file(os.path.join(folder, _ADAPTER))], made_later)
        return local_file(folder), ""
    files = sorted(Path(parent).expanduser().glob(f"*/{_ADAPTER}"))
    if not files and not is_worker():  # which need not see them
        raise DefinitionError(
            f"{location}: adapter is {folder!r}, but no folder in {parent!r} has {_ADAPTER}; "
            "correct the path"
        )
    return {file.parent.name: local_file(file.parent) for file in files}, column
