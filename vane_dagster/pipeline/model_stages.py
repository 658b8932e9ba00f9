"""Stages that call a provider's model: maps with a model task, the request made for each row."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vane_dagster._arguments import path_text, positive, text
from vane_dagster._keywords import unknown_arguments
from vane_dagster._secrets import keep_arguments
from vane_dagster.errors import CodeIdentityError, DefinitionError, SchemaError
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.fingerprint.local_file import FileContent, LocalFile, check_local_files
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.pipeline.contracts import BatchCall, RequestsCall
from vane_dagster.pipeline.decorators import CallOptions
from vane_dagster.pipeline.identity import (
    component,
    environment,
    local_files,
    value_identity,
)
from vane_dagster.pipeline.known_arguments import SAMPLING
from vane_dagster.pipeline.map_spec import MapBatchesSpec, Versions
from vane_dagster.pipeline.records import Model, StageOptions, Workers, refuse_for_prompts
from vane_dagster.pipeline.servers import ModelServer
from vane_dagster.pipeline.texts import texts_of
from vane_dagster.pipeline.udf import Udf
from vane_dagster.providers.batch_api import BatchApi
from vane_dagster.providers.model_client import ModelClient
from vane_dagster.providers.registry import built_in_name, provider_class
from vane_dagster.providers.usage import UsageAccount
from vane_dagster.storage.manifest import Component
from vane_dagster.types.callables import check_call

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline, Stage
    from vane_dagster.pipeline.stage_kind import Table
    from vane_dagster.providers.model_client import ModelTask

_RETRIES = 5
_DEFAULTS = {"prompt": (32, 16)}
"""Rows of a batch and batches in flight in a worker, for kinds that differ from the others."""
_PAID_ROWS = 512
"""Rows of a fragment whose answers cost money."""
_ANSWERS = 1
"""Increment if the built-in providers' answers, or the rows made from them, change."""


@dataclass(frozen=True)
class ModelStageSpec(MapBatchesSpec):
    """A stage that calls a provider's model.

    Attributes:
        provider: The provider's class.
        model: The model, with its name and the provider options that may change answers.
        model_task: The request made for each row.
    """

    provider: Any = None
    model: Model = field(default_factory=lambda: Model(""))
    model_task: Any = None

    def components(self, pipeline: Pipeline) -> Sequence[Component]:
        """The provider, the model, the values of the model task, and an inferred schema."""
        schema = self.schema.to_string(show_schema_metadata=False)
        return [
            *(Component(*part) for part in self.code(pipeline).parts),
            component("option", "provider", built_in_name(self.provider), _ANSWERS),
            *(
                component("option", name, value_identity(pipeline, self, name, value))
                for name, value in self._values.items()
            ),
            *environment(self),
            component("option", "on_error", self.failures.on_error == "null"),
            *([component("option", "schema", schema)] if self.pinned else ()),
        ]

    @property
    def _values(self) -> Mapping[str, Any]:
        """The options that count, by their names."""
        return {
            "model": self.model.name,
            "provider_options": self.model.options,
            **self.model_task.keyed(self.include),
        }

    def texts(self, pipeline: Pipeline) -> Mapping[str, str]:
        """The code, the messages and the other options."""
        values = {**self._values}
        if "messages" in values:
            values["messages"] = str(self.model_task.template)
        return texts_of({**self.code(pipeline).texts(), **values})

    def inferred_schema(
        self, pipeline: Pipeline, inferred: pa.Schema, given: pa.Schema, rows: int
    ) -> pa.Schema:
        """The column of vectors, if all have one size."""
        schema = super().inferred_schema(pipeline, inferred, given, rows)
        if not pa.types.is_fixed_size_list(schema[0].type):
            raise SchemaError(
                f"{pipeline._location(self.name)}: the vectors of the first {rows:,} rows differ "
                "in size. Declare dimensions=, so that vectors of another size are errors of their "
                "rows"
            )
        return schema

    @property
    def runs_own_code(self) -> bool:
        """True for a user's own provider, and with functions around the model."""
        return bool(self.model_task.functions) or built_in_name(self.provider) is None

    @property
    def _reads_by_name(self) -> bool:
        """False with functions, which get a row as a dict."""
        return not self.model_task.functions

    def row_versions(self, files: Mapping[LocalFile, FileContent]) -> Versions:
        """The content of each adapter that rows name."""
        task = self.model_task
        if not (column := getattr(task, "adapter_column", "")):
            return {}
        return {column: {name: files[file].digest for name, file in task.adapter.items()}}

    @property
    def in_batches(self) -> bool:
        """See `MapBatchesSpec`; as the model says."""
        return self.model.mode == "batch"

    @property
    def ranks(self) -> int:
        """See `MapBatchesSpec`; as the provider says."""
        options = self.udf.constructor_kwargs["options"]
        ranks = _asked(f"stage {self.name!r}", self.provider, "ranks", options, self.gpus)
        return int(ranks or 1)

    def with_workers(self, location: str, gpus: float, workers: Workers) -> MapBatchesSpec:
        """See `MapBatchesSpec`; the workers share the limits of the model."""
        if workers.count == "auto" and hasattr(self.provider, "shared_by"):
            raise DefinitionError(
                f'{location}: concurrency="auto" cannot divide the limits of {self.model.name!r} '
                "among its workers. Leave it out: one worker has many requests in flight"
            )
        most = workers.count[1] if isinstance(workers.count, tuple) else 1
        udf = replace(self.udf, kwargs={**self.udf.kwargs, "workers": most})
        return replace(super().with_workers(location, gpus, workers), udf=udf)

    def batch_api(self) -> BatchApi:
        """Connect to the provider's batch API."""
        api: BatchApi = self.provider.batch_api(self.udf.constructor_kwargs["options"])
        return api

    @property
    def key_variable(self) -> str | None:
        """The variable that the provider names."""
        options = self.udf.constructor_kwargs["options"]
        name = _asked(f"stage {self.name!r}", self.provider, "key_variable", options)
        return name if isinstance(name, str) else None

    @property
    def max_fragment_rows(self) -> int | None:
        """See `MapBatchesSpec`: answers of a fragment that are paid again if the run is killed."""
        is_paid = self.key_variable or self.model.prices
        return _PAID_ROWS if is_paid and not self.in_batches else None

    def code(self, pipeline: Pipeline) -> CodeIdentity:
        """Return the identity of the provider, and of the user's code that the model task needs.

        Built-in providers count by frozen names and a number. A new version of this package
        therefore recomputes nothing unless its answers change.
        """
        task = self.model_task
        found = self._code(pipeline, (*task.classes, *task.functions))
        # What its schema is also depends on the package of a model that is not the user's.
        schemas = [
            ("code", each.__qualname__, value_digest(task.format.schema)) for each in task.classes
        ]
        return replace(found, parts=(*found.parts, *schemas))

    def worker_code(self, pipeline: Pipeline) -> str:
        """Digest of the provider, and of code that a worker never sees a later edit of.

        A worker that has imported a module keeps it, so the user's code counts that does not travel
        with each call.
        """
        return self._code(pipeline, self.model_task.preloaded).digest

    def _code(self, pipeline: Pipeline, users: Iterable[Callable[..., Any]]) -> CodeIdentity:
        """Return the identity of the provider, and of some of the user's classes and functions."""
        name = built_in_name(self.provider)
        own = [*(() if name else (self.provider,)), *users]
        try:
            identities = [code_identity(each, files=local_files(pipeline, self)) for each in own]
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._location(self.name)}: {error}") from error
        packages = dict.fromkeys(package for one in identities for package in one.packages)
        identity = digest("provider", name, _ANSWERS, *(one.digest for one in identities))
        return CodeIdentity(
            identity,
            tuple(dict.fromkeys(part for one in identities for part in one.parts)),
            tuple(packages),
            find_modules=lambda: tuple(
                dict.fromkeys(module for one in identities for module in one.modules)
            ),
            find_texts=lambda: _joined(one.find_texts() for one in identities),
        )

    @property
    def _needed(self) -> Iterable[str]:
        """The columns that the model task needs."""
        return (*(self.columns or ()), *self.model_task.needed)

    def outputs(self, pipeline: Pipeline, inputs: Mapping[str, Table]) -> Table:
        """Those of a map. The columns with images, sounds and documents have fitting types."""
        upstream = self.upstream[0]
        for part in self.model_task.contents:
            field = inputs[upstream].fields.get(part.column)
            if field is not None and not part.fits(field.type):
                raise SchemaError(
                    f"{pipeline._location(self.name)}: column {part.column!r} of {upstream!r} is "
                    f"{field.type}, but vd.{part.kind} takes {part.expected}"
                )
        return super().outputs(pipeline, inputs)

    def _opened_columns(self, pipeline: Pipeline) -> Iterable[str]:
        """The columns of content, if the source lists files: the worker reads no others."""
        parts = self.model_task.contents if pipeline.source.names_files else ()
        return [part.column for part in parts if not part.fetch_by_provider]

    @property
    def code_files(self) -> Sequence[str]:
        """Empty: the code is a provider's."""
        return ()

    @property
    def packages(self) -> Sequence[str]:
        """The packages that the provider names."""
        return tuple(getattr(self.provider, "PACKAGES", ()))

    @property
    def usage(self) -> UsageAccount | None:
        """That of the model task's column, with the budgets and limits of the model."""
        column, model = self.model_task.usage, self.model
        own = self.udf.constructor_kwargs["options"] if hasattr(self.provider, "shared_by") else {}
        limits = {n: value for n, value in own.items() if value and n.endswith("_per_minute")}
        budgets = model.prices or {}, model.token_budget, model.cost_budget, self.in_batches, limits
        return None if column is None else UsageAccount(column, *budgets)

    @property
    def description(self) -> str | None:
        """The request to the model."""
        return str(self.model_task.describe(self.udf.name))


class ModelStageRows:
    """Rows that a model stage can read."""

    pipeline: Pipeline
    _node: str

    def _add_model_stage(
        self,
        kind: str,
        name: str,
        model_task: ModelTask,
        provider: str | type | None,
        model: str | os.PathLike[str] | ModelServer | Model,
        batch_size: int | None,
        options: StageOptions,
        is_inferred: bool = False,
    ) -> Stage:
        """Add a stage for a model task."""
        location = self.pipeline._location(name)
        default_batch, in_flight = _DEFAULTS.get(kind, (64, 4))
        if options.reuse.version is not None:
            raise DefinitionError(
                f"{location}: version replaces the identity of your code, and a model has none; "
                "leave it out"
            )
        if kind != "prompt":
            refuse_for_prompts(location, options.failures, model)
        self._check_columns(location, model_task, options)
        provider_type, record, given = _parse_model(location, model_task.method, provider, model)
        keep_arguments((), given)
        if record.mode == "batch":
            _check_batches(location, provider_type, record, given["options"], options)
        owner = f"{location}: the options of the model"
        takes = inspect.signature(provider_type).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            own = [each for each in takes if each != "model"]
            unknown = [each for each in given["options"] if each not in takes]
            advice = SAMPLING if kind != "embed" else {}
            if texts := unknown_arguments("vd.Model(options={...})", unknown, own, advice):
                raise DefinitionError(f"{location}: " + "\n".join(texts))
        check_call(owner, provider_type, ("model",), given["options"], "(model, **options)")
        _asked(location, provider_type, "check_options", given["options"], model_task.sampling)
        _check_features(location, provider_type, given["options"], model_task)
        label = f"{provider_type.__name__}({record.name!r})"
        udf = Udf(
            target=functools.partial(ModelClient, provider_type),
            stateful=True,
            is_async=True,
            kwargs={"model_task": model_task},
            constructor_kwargs=given,
            options=CallOptions(name_override=label),
        )
        workers = udf.workers(location, options.gpus or 0, options.workers, in_flight)
        check_local_files(location, udf.local_files, made_later=bool(options.asset.deps))
        spec = ModelStageSpec(
            name=name,
            upstream=(self._node,),
            asset=options.asset,
            kind=kind,
            udf=udf,
            schema=model_task.schema,
            is_inferred=is_inferred,
            columns=model_task.reads,
            contract=RequestsCall() if model_task.method == "submit" else BatchCall(),
            batch_size=positive(
                location,
                "batch_size",
                batch_size,
                getattr(provider_type, "TEXTS_OF_A_CALL", default_batch),
            ),
            auto_batch=False,
            cardinality="one_to_one",
            workers=workers,
            gpus=options.gpus or 0,
            failures=options.failures._resolved(None, _RETRIES),
            reuse=options.reuse,
            include=options.include,
            row_order=model_task.order,
            provider=provider_type,
            model=record,
            model_task=model_task,
        )
        return self.pipeline._add_udf(spec.with_workers(location, spec.gpus, workers))

    def _check_columns(self, location: str, model_task: ModelTask, options: StageOptions) -> None:
        """Raise DefinitionError for columns that are known to be missing or duplicate."""
        ids = self.pipeline._key_columns(self._node)
        named = () if options.include is True else options.include
        made = model_task.schema.names
        if twice := sorted({*named, *ids} & set(made)):
            raise DefinitionError(
                f"{location}: two columns would be called {twice[0]!r}; give output_column another "
                "name"
            )


def _parse_model(
    location: str, method: str, provider: str | type | None, model: Any
) -> tuple[type, Model, dict[str, Any]]:
    """Return a provider, its model with the options that count, and the arguments of its client."""
    record = model if isinstance(model, Model) else Model(model)
    options, name = dict(sorted(record.options.items())), record.name
    server = name if isinstance(name, ModelServer) else options.get("server")
    if isinstance(server, ModelServer):
        options["server"] = server
        if server.workers.max_concurrency is not None:
            options.setdefault("max_connections", server.workers.max_concurrency)
        provider, name = provider or "openai", server.model if name is server else name
    name = name if isinstance(name, LocalFile) else path_text(name)
    name = text(location, "model", name, "a model's name or folder, a server or vd.Model(...)")
    if provider is None:
        raise DefinitionError(f'{location}: provider is missing; expected one, such as "openai"')
    provider_type = provider_class(location, provider, method)
    if "server" in options and "server" not in inspect.signature(provider_type).parameters:
        raise DefinitionError(
            f"{location}: provider {provider_type.__name__} does not call a server; leave provider "
            "out, or pass the name of a model"
        )
    counted = _keyed(options, getattr(provider_type, "OPERATIONAL", ()))
    return (
        provider_type,
        replace(record, name=name, options=counted),
        {"model": name, "options": options},
    )


def column_named(location: str, stage: str, output_column: str | None) -> str:
    """Return the column of a stage's result."""
    given = stage if output_column is None else output_column
    return text(location, "output_column", given, "a name")


def _asked(location: str, provider: Any, name: str, *given: Any) -> Any:
    """Return the answer of a class method of a provider; None without one."""
    method = getattr(provider, name, None)
    try:
        # A user's class may define an unrelated method with this name.
        return method(*given) if inspect.ismethod(method) else None
    except (ValueError, DefinitionError) as error:
        raise DefinitionError(f"{location}: {error}") from error


def _check_features(
    location: str, provider: type, options: Mapping[str, Any], model_task: ModelTask
) -> None:
    """Raise DefinitionError for content, adapters and reasoning that the provider lacks."""
    features = _asked(location, provider, "features", options) or ()
    for name, reason in model_task.features.items():
        if name not in features:
            raise DefinitionError(
                f"{location}: {provider.__name__} has no {name} here, only "
                f"{', '.join(('text', *sorted(features)))}: {reason}"
            )


def _check_batches(
    location: str,
    provider: type,
    model: Model,
    arguments: Mapping[str, Any],
    options: StageOptions,
) -> None:
    """Raise DefinitionError if requests cannot go into batches."""
    where = f"{location}: mode={model.mode!r}"
    has_batches = hasattr(provider, "batch_api") and getattr(provider, "BATCHES", True)
    if not has_batches or "server" in arguments:
        raise DefinitionError(
            f'{where}: only the providers "openai" and "anthropic" have batches; leave mode out '
            "for this provider"
        )
    if "InvalidAnswer" in options.failures.retry_on:
        raise DefinitionError(
            f'{where}: retry_on has "InvalidAnswer", but a batch has one answer for each prompt; '
            "vd.Failures(explain_errors=1) asks again in the next batch"
        )


def _keyed(
    options: Mapping[str, Any], operational: Collection[str], above: str = ""
) -> dict[str, Any]:
    """Return the options that may change answers; nested names have the form ``"option.name"``."""
    return {
        name: _keyed(value, operational, f"{above}{name}.") if isinstance(value, Mapping) else value
        for name, value in options.items()
        if f"{above}{name}" not in operational
    }


def _joined(several: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the texts of several codes, some of which are in one file."""
    pairs = [pair for texts in several for pair in texts.items()]
    return {name: "".join(text for label, text in pairs if label == name) for name, _ in pairs}
