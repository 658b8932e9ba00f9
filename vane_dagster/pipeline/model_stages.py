"""Stages that call a provider's model: maps with a model task, the request made for each row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster._keywords import require_columns
from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import CodeIdentityError, DefinitionError, names
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.pipeline.contracts import BatchCall
from vane_dagster.pipeline.foreign_arguments import (
    StageCall,
    check_value,
    misplaced_option,
    stage_call,
)
from vane_dagster.pipeline.identity import (
    component,
    environment,
    in_any_order,
    local_files,
    value_identity,
)
from vane_dagster.pipeline.options import IncludeColumns, parse_include
from vane_dagster.pipeline.records import (
    Failures,
    Model,
    StageOptions,
    as_asset,
    as_reuse,
    as_workers,
    refuse_for_prompts,
)
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.pipeline.specs import MapBatchesSpec, Schemas, declares_columns
from vane_dagster.pipeline.udf import Udf
from vane_dagster.providers.model_client import ModelClient, ModelTask
from vane_dagster.providers.registry import built_in_name, provider_class
from vane_dagster.providers.usage import over_budget, usage_metadata
from vane_dagster.storage.manifest import Component
from vane_dagster.types.schema import ERROR_COLUMN

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline, Stage

_RETRIES = 5
_ANSWERS = 1
"""Increment if the built-in providers' answers, or the rows made from them, change."""


@dataclass(frozen=True)
class ModelStageSpec(MapBatchesSpec):
    """A stage that calls a provider's model.

    Attributes:
        provider: The provider's class.
        model: The model's name.
        options: The provider options that may change answers.
        model_task: The request made for each row.
    """

    provider: Any = None
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    model_task: Any = None

    default_batch = 64
    default_in_flight = 4

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The provider, the model, the values of the model task, and an inferred schema."""
        schema = self.schema.to_string(show_schema_metadata=False)
        return [
            *self._request(pipeline, self.include),
            component("option", "on_error", self.failures.on_error == "null"),
            *([component("option", "schema", schema)] if self.pinned else ()),
        ]

    def computation(self, pipeline: Pipeline) -> Sequence[object]:
        """The same, without the columns that pass through."""
        return [each.digest for each in self._request(pipeline, ())]

    def _request(self, pipeline: Pipeline, include: IncludeColumns) -> list[Component]:
        options = in_any_order(self.provider, self.options)
        values = {
            "model": self.model,
            "provider_options": options,
            **self.model_task.keyed(include),
        }
        return [
            Component("code", self.udf.name, self.code(pipeline).digest),
            *(
                component("option", name, value_identity(pipeline, self, name, value))
                for name, value in values.items()
            ),
            *environment(pipeline, self),
        ]

    @property
    def runs_own_code(self) -> bool:
        """True for a user's own provider, and with functions around the model."""
        return bool(self.model_task.functions) or built_in_name(self.provider) is None

    @property
    def _reads_by_name(self) -> bool:
        """False with functions, which get a row as a dict."""
        return not self.model_task.functions

    @property
    def key_variable(self) -> str | None:
        """The variable that the provider names."""
        find = getattr(self.provider, "key_variable", None)
        if not inspect.ismethod(find):  # a user's class may have a method of its own by this name
            return None
        name = find(self.udf.constructor_kwargs["options"])
        return name if isinstance(name, str) else None

    def code(self, pipeline: Pipeline) -> CodeIdentity:
        """Return the identity of the provider, and of the user's code that the model task needs.

        Built-in providers count by frozen names and a number. A new version of this package
        therefore recomputes nothing unless its answers change.
        """
        return self._code(pipeline, (*self.model_task.classes, *self.model_task.functions))

    def _code(self, pipeline: Pipeline, own: Sequence[Callable[..., Any]]) -> CodeIdentity:
        """Return the identity of the provider, and of `own`."""
        name = built_in_name(self.provider)
        try:
            every = [*([] if name else [self.provider]), *own]
            found = [code_identity(each, files=local_files(pipeline, self)) for each in every]
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._location(self.name)}: {error}") from error
        packages = dict.fromkeys(package for one in found for package in one.packages)
        identity = digest("provider", name, _ANSWERS, *(one.digest for one in found))
        return CodeIdentity(
            identity,
            (("code", self.udf.name, identity),),
            tuple(packages),
            find_modules=lambda: tuple(
                dict.fromkeys(module for one in found for module in one.modules)
            ),
            statements=tuple(statement for one in found for statement in one.statements),
        )

    def code_digest(self) -> str:
        """Digest of a user's own provider, and of the user's code that the model task needs."""
        unread = LocalFiles(read=False)
        provider = [] if built_in_name(self.provider) else [self.provider]
        own = (*provider, *self.model_task.classes, *self.model_task.functions)
        return digest(*(code_identity(each, files=unread).digest for each in own))

    def worker_code(self, pipeline: Pipeline) -> str:
        """Digest of the provider, and of code that a worker never sees a later edit of.

        A worker that has imported a module keeps it, so the user's classes count, and those
        functions that do not travel with each call.
        """
        own = (*self.model_task.classes, *self.model_task.preloaded)
        return self._code(pipeline, own).digest

    def output_schema(self, pipeline: Pipeline, inputs: Schemas) -> pa.Schema:
        """The columns that the model task makes, and those that pass through."""
        first = inputs[self.upstream[0]]
        owner = f"{pipeline._location(self.name)}: {self.upstream[0]!r}"
        require_columns(owner, self.model_task.needed, first.names)
        return super().output_schema(pipeline, inputs)

    @property
    def code_files(self) -> Sequence[str]:
        """Empty: the code is a provider's."""
        return ()

    @property
    def packages(self) -> Sequence[str]:
        """The packages that the provider names."""
        return tuple(getattr(self.provider, "PACKAGES", ()))

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """The fields that the model task names."""
        return dict(self.model_task.sums)

    @property
    def description(self) -> str | None:
        """The request to the model."""
        return str(self.model_task.describe(self.udf.name))


@dataclass(frozen=True)
class PromptSpec(ModelStageSpec):
    """A stage that prompts a language model. Its model task is a `PromptTask`.

    Attributes:
        prices: Prices of a million tokens, by kind.
        token_budget: Token budget of a run: prompts and answers together.
        cost_budget: Cost budget of a run, in the currency of `prices`.
    """

    prices: Mapping[str, float] = field(default_factory=dict)
    token_budget: int | None = None
    cost_budget: float | None = None

    kind = "prompt"
    default_batch = 32
    default_in_flight = 16

    def over_budget(self, used: Mapping[str, int]) -> str | None:
        """Describe the token or cost budget that is exhausted."""
        return over_budget(used, self.prices, self.token_budget, self.cost_budget)

    def usage_metadata(self, used: Mapping[str, int], seconds: float | None) -> dict[str, Any]:
        """Tokens, throughput and cost.

        Args:
            used: See `StageKind.usage_metadata`.
            seconds: See `StageKind.usage_metadata`.
        """
        return usage_metadata(used, self.prices, seconds)


@dataclass(frozen=True)
class EmbedSpec(ModelStageSpec):
    """A stage that embeds a column. Its model task is an `EmbedTask`."""

    kind = "embed"
    schema_argument = "dimensions="


class ModelStageRows:
    """Rows that a model stage can read."""

    pipeline: Pipeline
    _node: str

    def _add_model_stage(
        self,
        kind: type[ModelStageSpec],
        name: str,
        model_task: ModelTask,
        own: Mapping[str, Any],
        provider: str | type | None,
        model: str | ModelServer | Model,
        batch_size: int | None,
        options: StageOptions,
    ) -> Stage:
        """Add a stage for a model task.

        Args:
            kind: The class of its spec.
            name: The stage's name.
            model_task: What the model is asked.
            own: The fields that only its kind of spec has.
            provider: See `prompt`.
            model: See `prompt`.
            batch_size: See `prompt`.
            options: What all stages with workers take.

        Raises:
            DefinitionError: If an argument is invalid.
        """
        location = self.pipeline._location(name)
        check_value(location, "on_error", options.on_error)
        failures = options.failures(location)._resolved(None, _RETRIES)
        reuse = as_reuse(location, options.reuse)
        if reuse.version is not None:
            raise DefinitionError(
                f"{location}: version replaces the identity of your code, and a model has none; "
                "leave it out"
            )
        if kind.kind != "prompt":
            refuse_for_prompts(location, failures, model)
        include = parse_include(location, options.include_columns)
        self._check_columns(location, model_task, include, failures)
        found, label, given = _parse_model(location, model_task.method, provider, model)
        keep_arguments((), given)
        call = stage_call(getattr(self, kind.kind))
        _check_options(location, found, given["options"], call)
        _check_values(location, found, given["options"], model_task.declared_sampling)
        workers = as_workers(location, options.concurrency)
        udf = Udf(
            target=functools.partial(ModelClient, found),
            stateful=True,
            style="async",
            constructor_kwargs=given,
            label=f"{found.__name__}({label!r})",
        )
        fields = workers._fields(location, options.gpus or 0, True, udf.name)
        most = fields["concurrency"][1]
        spec = kind(
            name=name,
            upstream=(self._node,),
            asset=as_asset(location, options.asset),
            udf=replace(udf, kwargs={"model_task": model_task, "workers": most}),
            schema=model_task.schema,
            columns=model_task.reads,
            contract=BatchCall(),
            auto_batch=False,
            cardinality="one_to_one",
            failures=failures,
            include=include,
            order=model_task.order,
            provider=found,
            model=label,
            options=_keyed(given["options"], getattr(found, "OPERATIONAL", ())),
            model_task=model_task,
            batch_size=positive(location, "batch_size", batch_size, kind.default_batch),
            max_concurrency=workers.max_concurrency or kind.default_in_flight,
            reuse=reuse,
            **fields,
            **own,
        )
        return self.pipeline._add(spec.with_reuse(self.pipeline))

    def _check_columns(
        self, location: str, model_task: ModelTask, include: IncludeColumns, failures: Failures
    ) -> None:
        """Raise DefinitionError for columns that are known to be missing or duplicate."""
        ids = [key.column for key in self.pipeline._keys_of(self._node)]
        error = [ERROR_COLUMN] if failures.on_error == "null" else []
        named = () if include is True else include
        made = model_task.schema.names
        if twice := sorted({*named, *ids, *error} & set(made)):
            raise DefinitionError(
                f"{location}: two columns would be called {twice[0]!r}; give output_column another "
                "name"
            )
        if not declares_columns(self.pipeline, self._node):
            return
        known = self.pipeline._declared_types()[self._node]
        read = dict.fromkeys((*(model_task.reads or ()), *model_task.needed, *named))
        require_columns(f"{location}: {self._node!r}", read, known, DefinitionError)


def _parse_model(
    location: str, method: str, provider: str | type | None, model: Any
) -> tuple[type, str, dict[str, Any]]:
    """Return a provider, the name of its model, and the arguments of its client."""
    record = model if isinstance(model, Model) else Model(model)
    options, name = dict(record.options), record.name
    server = name if isinstance(name, ModelServer) else options.get("server")
    if isinstance(server, ModelServer):
        options["server"] = server.handle
        if server.workers.max_concurrency is not None:
            options.setdefault("max_connections", server.workers.max_concurrency)
        provider, name = provider or "openai", server.model if name is server else name
    if not isinstance(name, str) or not name:
        raise DefinitionError(
            f"{location}: model is {name!r}; expected a model's name, a server or vd.Model(...)"
        )
    if provider is None:
        raise DefinitionError(f'{location}: provider is missing; expected one, as "openai"')
    found = provider_class(location, provider, method)
    if "server" in options and "server" not in (p.name for p in constructor_options(found)):
        raise DefinitionError(
            f"{location}: provider {found.__name__} calls no server; leave provider out, or name "
            "the model"
        )
    return found, name, {"model": name, "options": options}


def name_of(location: str, value: Any, argument: str = "output_column") -> str:
    """Return `value` if it is a column name.

    Args:
        location: The stage, for messages.
        value: The value of the argument.
        argument: The argument's name, for messages.

    Raises:
        DefinitionError: If it is not a non-empty string.
    """
    if not isinstance(value, str) or not value:
        raise DefinitionError(f"{location}: {argument} is {value!r}; expected a name")
    return value


def _check_options(
    location: str, provider: type, options: Mapping[str, Any], call: StageCall
) -> None:
    """Raise DefinitionError for options that the provider's constructor does not accept."""
    parameters = inspect.signature(provider).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    takes = constructor_options(provider)
    known = [each.name for each in takes]
    if unknown := sorted(set(options) - set(known)):
        corrections = (misplaced_option(call, name, options[name], known) for name in unknown)
        raise DefinitionError(
            f"{location}: the options of the model have {names(unknown)}, which "
            f"{provider.__name__} does not take; it takes {names(known, 20)}{''.join(corrections)}"
        )
    needed = [each.name for each in takes if each.default is each.empty]
    if missing := [name for name in needed if name not in options]:
        raise DefinitionError(
            f"{location}: the options of the model lack {names(missing)}, which "
            f"{provider.__name__} needs"
        )


def _check_values(
    location: str, provider: type, options: Mapping[str, Any], sampling: Mapping[str, Any]
) -> None:
    """Raise DefinitionError for options or sampling parameters that the provider refuses."""
    check = getattr(provider, "check_options", None)
    if not inspect.ismethod(check):  # a user's class may have a method of its own by this name
        return
    try:
        check(options, sampling)
    except ValueError as error:
        raise DefinitionError(f"{location}: {error}") from error


def constructor_options(provider: type) -> list[inspect.Parameter]:
    """Return the parameters of a provider's constructor after the model's name."""
    parameters = list(inspect.signature(provider).parameters.values())[1:]
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _keyed(
    options: Mapping[str, Any], operational: Collection[str], above: str = ""
) -> dict[str, Any]:
    """Return the options that may change answers; nested names have the form ``"option.name"``."""
    return {
        name: _keyed(value, operational, f"{above}{name}.") if isinstance(value, Mapping) else value
        for name, value in options.items()
        if f"{above}{name}" not in operational
    }
