"""Stages that ask a provider's model: maps with a recipe of what is asked of each row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import (
    environment_variables,
    mapping,
    parse_concurrency,
    positive,
)
from vane_dagster._secrets import keep_arguments
from vane_dagster.checks.builtin import DEFAULT_ERROR_RATE
from vane_dagster.errors import CodeIdentityError, DefinitionError, names
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.constructor import ConstructorIdentity
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.hashing import digest
from vane_dagster.pipeline.identity import environment, in_any_order, local_files, value_identity
from vane_dagster.pipeline.options import (
    Failures,
    OnError,
    Resources,
    asset_options,
    parse_failures,
    parse_upkeep,
)
from vane_dagster.pipeline.specs import SOURCE, MapBatchesSpec
from vane_dagster.pipeline.udf import Udf
from vane_dagster.providers.asker import Asker, Recipe
from vane_dagster.providers.registry import built_in_name, provider_class
from vane_dagster.providers.usage import over_budget, usage_metadata
from vane_dagster.types.schema import ERROR_COLUMN

if TYPE_CHECKING:
    from vane_dagster.pipeline.pipeline import Pipeline, Stage

_ANSWERS = 1
"""Raised when our providers' answers, or what is made of them, change."""


@dataclass(frozen=True)
class AskSpec(MapBatchesSpec):
    """Something asked of a provider's model.

    Attributes:
        provider: The provider's class.
        model: The model's name.
        options: What the provider is given that may change answers.
        recipe: What is asked.
    """

    provider: Any = None
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    recipe: Any = None

    default_batch = 64

    def definition(self, pipeline: Pipeline) -> Sequence[object]:
        """The provider, the model, and what is asked of it."""
        options = in_any_order(self.provider, self.options)
        return [
            self.code(pipeline).digest,
            value_identity(pipeline, self, "model", self.model),
            value_identity(pipeline, self, "provider_options", options),
            *(
                part
                for name, value in self.recipe.keyed.items()
                for part in (name, value_identity(pipeline, self, name, value))
            ),
            self.failures.on_error == "null",
            *environment(pipeline, self),
        ]

    def code(self, pipeline: Pipeline) -> CodeIdentity:
        """Identity of the provider, and of the user's classes that the recipe needs.

        These are part of it, since a worker that has imported one never meets it again once it was
        edited. Our providers count by frozen names and a number, so that a new version of this
        package computes nothing again unless it answers in another way.
        """
        name = built_in_name(self.provider)
        try:
            classes = [*([] if name else [self.provider]), *self.recipe.classes]
            found = [code_identity(kind, files=local_files(pipeline, self)) for kind in classes]
        except CodeIdentityError as error:
            raise CodeIdentityError(f"{pipeline._culprit(self.name)}: {error}") from error
        modules = dict.fromkeys(module for one in found for module in one.modules)
        packages = dict.fromkeys(package for one in found for package in one.packages)
        code = digest("provider", name, _ANSWERS, *(one.digest for one in found))
        return CodeIdentity(code, tuple(modules), tuple(packages))

    def code_digest(self) -> str:
        """Digest of a user's own provider, and of the classes that the recipe needs."""
        unread = LocalFiles(read=False)
        own = [] if built_in_name(self.provider) else [self.provider]
        return digest(
            *(code_identity(kind, files=unread).digest for kind in (*own, *self.recipe.classes))
        )

    def constructed(self, pipeline: Pipeline) -> ConstructorIdentity:
        """Identity of the provider, of which versions share no state."""
        return ConstructorIdentity(self.code(pipeline).digest, False)

    @property
    def code_files(self) -> Sequence[str]:
        """None: its code is a provider's."""
        return ()

    @property
    def packages(self) -> Sequence[str]:
        """Those that the provider names."""
        return tuple(getattr(self.provider, "PACKAGES", ()))

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """Those that the recipe names."""
        return dict(self.recipe.sums)

    @property
    def description(self) -> str | None:
        """What is asked of the model."""
        return str(self.recipe.told(self.udf.name))


@dataclass(frozen=True)
class PromptSpec(AskSpec):
    """A prompt over rows, whose recipe is a `Prompt`.

    Attributes:
        prices: Of a million tokens, by kind.
        max_tokens: Tokens of prompts and answers that a run may use.
        max_cost: What a run may cost.
    """

    prices: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    max_cost: float | None = None

    kind = "prompt"
    default_batch = 32

    def over_budget(self, used: Mapping[str, int]) -> str | None:
        """Whether tokens or costs are used up."""
        return over_budget(used, self.prices, self.max_tokens, self.max_cost)

    def usage_metadata(self, used: Mapping[str, int], seconds: float | None) -> dict[str, Any]:
        """Tokens, their speed and cost."""
        return usage_metadata(used, self.prices, seconds)


@dataclass(frozen=True)
class EmbedSpec(AskSpec):
    """A column's embeddings, whose recipe is an `Embed`."""

    kind = "embed"


class AskRows:
    """Rows of which something can be asked."""

    pipeline: Pipeline
    _node: str

    def _ask(
        self,
        kind: type[AskSpec],
        name: str,
        recipe: Recipe,
        own: Mapping[str, Any],
        *,
        provider: str | type,
        model: str,
        provider_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        max_concurrency: int = 4,
        concurrency: int | tuple[int, int] | None = None,
        gpus_per_actor: float = 0,
        num_cpus: float = 0,
        memory: int = 0,
        accelerator_type: str | None = None,
        resources: Mapping[str, float] | None = None,
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
        """Adds a stage of a recipe; `own` are fields that its kind of spec alone has.

        The other arguments are those of `prompt`.
        """
        culprit = self.pipeline._culprit(name)
        custom = mapping(culprit, "resources", resources)
        needs = Resources(num_cpus, gpus_per_actor, memory, accelerator_type, custom)
        needs.validate(culprit)
        failures = parse_failures(
            culprit, on_error, max_error_rate, max_retries, retry_on, timeout_s
        )
        self._check_columns(culprit, recipe, failures)
        if not isinstance(model, str) or not model:
            raise DefinitionError(f"{culprit}: model is {model!r}; expected a model's name")
        found = provider_class(culprit, provider, recipe.method)
        options = mapping(culprit, "provider_options", provider_options)
        arguments = {"model": model, "options": options}
        keep_arguments((), arguments)
        workers = parse_concurrency(culprit, concurrency) or (1, 1)
        forwarded, keyed = environment_variables(culprit, env_vars, keyed_env_vars)
        _check_options(culprit, found, options)
        operational = getattr(found, "OPERATIONAL", ())
        udf = Udf(
            target=functools.partial(Asker, found),
            stateful=True,
            style="async",
            kwargs={"recipe": recipe, "workers": workers[1]},
            constructor_kwargs=arguments,
            label=f"{found.__name__}({model!r})",
        )
        return self.pipeline._add(
            kind(
                name=name,
                upstream=(self._node,),
                asset=asset_options(culprit, asset),
                udf=udf,
                schema=recipe.schema,
                columns=recipe.reads,
                batch_format="pyarrow",
                auto_batch=False,
                cardinality="one_to_one",
                concurrency=workers,
                resources=needs,
                env_vars=forwarded,
                keyed_env_vars=keyed,
                failures=failures,
                upkeep=parse_upkeep(culprit, startup_timeout_s, max_batches_per_actor, None),
                carried=recipe.carried,
                order=recipe.order,
                provider=found,
                model=model,
                options=_keyed(options, operational),
                recipe=recipe,
                batch_size=positive(culprit, "batch_size", batch_size, kind.default_batch),
                max_concurrency=positive(culprit, "max_concurrency", max_concurrency, 4),
                **own,
            )
        )

    def _check_columns(self, culprit: str, recipe: Recipe, failures: Failures) -> None:
        """Raises DefinitionError for columns that are known to be missing, or to be there twice."""
        ids = [key.column for key in self.pipeline.keys(self._node)]
        error = [ERROR_COLUMN] if failures.on_error == "null" else []
        if twice := sorted({*recipe.carried, *ids, *error} & set(recipe.schema.names)):
            raise DefinitionError(
                f"{culprit}: two columns would be called {twice[0]!r}; give output_column another "
                "name"
            )
        if self._node == SOURCE:
            return
        known = self.pipeline.declared_types()[self._node]
        if missing := [column for column in recipe.reads if column not in known]:
            raise DefinitionError(
                f"{culprit}: needs {names(missing)}, which {self._node!r} does not have; it has "
                f"{names(known, 20)}"
            )


def name_of(culprit: str, value: Any, argument: str = "output_column") -> str:
    """`value` if it is a column's name; raises DefinitionError otherwise."""
    if not isinstance(value, str) or not value:
        raise DefinitionError(f"{culprit}: {argument} is {value!r}; expected a name")
    return value


def _check_options(culprit: str, provider: type, options: Mapping[str, Any]) -> None:
    """Raises DefinitionError for options that a provider's constructor does not take."""
    takes = list(inspect.signature(provider).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in takes):
        return
    known = [each.name for each in takes if each.kind is not each.VAR_POSITIONAL]
    if unknown := sorted(set(options) - set(known)):
        raise DefinitionError(
            f"{culprit}: provider_options has {names(unknown)}, which {provider.__name__} does not "
            f"take; it takes {names(known, 20)}"
        )
    needed = [each.name for each in takes if each.default is each.empty]
    if missing := [name for name in needed if name in known and name not in options]:
        raise DefinitionError(
            f"{culprit}: provider_options lacks {names(missing)}, which {provider.__name__} needs"
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
