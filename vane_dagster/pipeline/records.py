"""Records of the arguments of stages that few stages need: workers, failures, reuse and so on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from vane_dagster._arguments import (
    flag,
    list_of_names,
    mapping,
    number,
    one_of,
    parse_workers,
    path_text,
    positional,
    positive,
    seconds,
    text,
    unexpected,
    whole,
)
from vane_dagster._keywords import checked_record
from vane_dagster.errors import DefinitionError, names
from vane_dagster.fingerprint.local_file import LocalFile
from vane_dagster.pipeline.options import (
    STARTUP_SECONDS,
    ExecutionBackend,
    IncludeColumns,
    OnError,
    ReuseMode,
    WorkerLifecycle,
    check_amount,
    parse_include,
)
from vane_dagster.providers.usage import PRICED

if TYPE_CHECKING:
    from vane_dagster.pipeline.servers import ModelServer


ModelMode = Literal["live", "batch"]
"""How a provider is asked."""
_Validator = Callable[[str, str, Any], Any]
"""Returns the normalized value of a named argument at a place in the user's code, or raises."""


def _validate(record: Any, **validators: _Validator) -> None:
    """Replace the fields of a record by their validated values."""
    for name, validate in validators.items():
        value = validate(f"vd.{type(record).__name__}", name, getattr(record, name))
        object.__setattr__(record, name, value)


def _optional(validate: _Validator) -> _Validator:
    return lambda where, name, value: None if value is None else validate(where, name, value)


def _choice(literal: Any) -> _Validator:
    return _optional(functools.partial(one_of, allowed=get_args(literal)))


def _sorted_names(where: str, name: str, value: Any) -> tuple[str, ...]:
    value = sorted(value) if isinstance(value, (set, frozenset)) else value
    return list_of_names(where, name, value) or ()


def _variables(where: str, name: str, value: Any) -> tuple[str, ...]:
    listed = list_of_names(where, name, value) or ()
    if wrong := [each for each in listed if not each or "=" in each]:
        raise DefinitionError(  # the value may be a secret
            f"{where}: {name} has {wrong[0].partition('=')[0]!r} with a value, or an empty name; "
            "expected only names of variables that are set in the driver"
        )
    return tuple(dict.fromkeys(listed))


def _folder(where: str, name: str, value: Any) -> str:
    path = value.path if isinstance(value, LocalFile) else path_text(value)
    return text(where, name, path, "the path of a folder")


def _prices(where: str, name: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, Mapping) and value and set(value) <= PRICED):
        expected = f"the price of a million tokens by kind, {names(sorted(PRICED))}"
        raise unexpected(where, name, value, f"{expected}, such as {{'prompt': 0.15}}")
    for kind, price in (value or {}).items():
        expected = "a number from 0 up"
        number(where, f"{name}[{kind!r}]", price, expected, lambda given: given >= 0)
    return value


def _error_names(where: str, name: str, value: Any) -> tuple[str, ...]:
    listed = positional(where, name, value, "a list of classes")
    kinds = [str(getattr(kind, "__name__", kind)).rpartition(".")[2] for kind in listed]
    if wrong := [kind for kind in kinds if not kind.isidentifier()]:
        raise DefinitionError(
            f"{where}: {name} holds {wrong[0]!r}; expected exception classes or their names"
        )
    return tuple(kinds)


@checked_record("concurrency", "vd.Workers")
@dataclass(frozen=True)
class Workers:
    """The workers of a stage: their number, what each reserves, and how it runs.

    ``concurrency=4`` is short for ``concurrency=vd.Workers(4)``.

    A worker sets ``OMP_NUM_THREADS`` and the variables of MKL, OpenBLAS and TensorFlow to its share
    of the node. ONNX Runtime reads none: set ``SessionOptions.intra_op_num_threads`` to
    ``int(os.environ["OMP_NUM_THREADS"])``. TensorFlow and JAX take GPU memory as needed, because
    workers may share a GPU; name ``TF_FORCE_GPU_ALLOW_GROWTH`` or ``XLA_PYTHON_CLIENT_PREALLOCATE``
    in `env_vars` for their own default. A process that imports both TensorFlow and vLLM aborts,
    because each contains LLVM. To share one copy of a model among threads, write ``async def
    __call__`` with ``await asyncio.to_thread(...)``, and set `max_concurrency`.

    Attributes:
        count: The number of workers, or (min, max) depending on the cluster's free resources, or
            "auto": one for each batch of the run, up to the number that fits on the cluster's GPUs,
            or on its CPUs if it has none. Default: 1 for a class, "auto" for a function.
        num_cpus: CPUs that a worker reserves. Default: the decorator's value, or 0.
        memory: Bytes of memory that a worker reserves.
        accelerator_type: The GPU type, as Ray names it, such as "A100".
        resources: Custom cluster resources that a worker reserves.
        max_concurrency: Calls of an async function that run at the same time in one worker, by
            default 16; for `prompt` and `embed`, batches: a prompt's worker has up to
            ``max_concurrency * batch_size`` requests in flight. A worker runs one call of a
            synchronous function at a time; for such functions, this is the number of workers if
            `count` is not set.
        startup_timeout_s: Time limit in seconds for constructing the class in a worker. The error
            shows what the worker was executing. Default: 1800.
        max_batches: Number of calls after which a worker is replaced, between two tasks, for models
            or libraries that leak memory. Calls that isolate failed rows may exceed it.
        max_rss: Bytes of memory above which a worker is replaced, between two calls. Counts the
            private memory of its processes, without mapped files and shared tables.
        env_vars: Names of environment variables. Their values are sent to the workers with each
            run. They are not stored or logged, and are not part of keys.
        keyed_env_vars: The same for variables that change results, such as the language of a model.
            A new value makes new fragment keys and new workers. Only a digest of the value is used;
            the value is not stored or logged. Do not name secrets: rotating a secret would
            recompute everything.
        execution_backend: Where the workers run: "ray_actor" or "ray_task" on the Ray cluster;
            "subprocess_actor" or "subprocess_task" on the machine of the run, for code that needs a
            license, device or service of that machine. A class is constructed once under both
            names. Default: the workers of the compute resource.

    Raises:
        DefinitionError: If a value is invalid.
    """

    count: int | tuple[int, int] | Literal["auto"] | None = None
    num_cpus: float | None = None
    memory: int = 0
    accelerator_type: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    max_concurrency: int | None = None
    startup_timeout_s: float | None = None
    max_batches: int | None = None
    max_rss: int | None = None
    env_vars: Sequence[str] = ()
    keyed_env_vars: Sequence[str] = ()
    execution_backend: ExecutionBackend | None = None

    def __post_init__(self) -> None:
        _validate(
            self,
            count=parse_workers,
            accelerator_type=_optional(functools.partial(text, expected="a name")),
            resources=mapping,
            max_concurrency=positive,
            startup_timeout_s=seconds,
            max_batches=positive,
            max_rss=positive,
            env_vars=_variables,
            keyed_env_vars=_variables,
            execution_backend=_choice(ExecutionBackend),
        )
        self._bundle("vd.Workers", 0)

    def _bundle(self, where: str, gpus: float) -> dict[str, float]:
        """Return the amounts that a worker reserves, without those of 0, by Ray's names."""
        own = {"num_cpus": self.num_cpus or 0, "gpus": gpus, "memory": self.memory}
        if taken := self.resources.keys() & {*own, "CPU", "GPU"}:
            raise DefinitionError(
                f"{where}: resources names {min(taken)!r}; use num_cpus, gpus or memory for it"
            )
        for name, amount in (own | dict(self.resources)).items():
            check_amount(where, name, amount)
        amounts = {"CPU": own["num_cpus"], "GPU": gpus, "memory": self.memory, **self.resources}
        if self.accelerator_type:
            amounts[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {name: float(amount) for name, amount in amounts.items() if amount}

    @property
    def _lifecycle(self) -> WorkerLifecycle:
        """When a worker is given up, or replaced."""
        startup = STARTUP_SECONDS if self.startup_timeout_s is None else self.startup_timeout_s
        return WorkerLifecycle(float(startup), self.max_batches, self.max_rss)

    @property
    def _env_vars(self) -> tuple[str, ...]:
        """The environment variables that are sent to the workers, including keyed ones."""
        return tuple(dict.fromkeys((*self.env_vars, *self.keyed_env_vars)))


@checked_record("on_error", "vd.Failures")
@dataclass(frozen=True)
class Failures:
    """How failed calls and failed rows of a stage are handled.

    ``on_error="quarantine"`` is short for ``on_error=vd.Failures("quarantine")``.

    Attributes:
        on_error: How a failed batch is handled. "raise", the default, fails the partition.
            "quarantine" halves the batch until the failed rows are isolated, stores those with
            their errors beside the output, and continues. "null" keeps them in the output as nulls,
            with the error in a column "error".
        max_error_rate: The share of a partition's rows that may fail. If more rows fail, the
            partition fails. It also fails if all rows fail, unless the rate is 1. Default: 0.01, or
            10 rows if that is more. A rate that you set is exact.
        max_retries: Retries of a call, with exponential backoff, after a transient error: a
            connection error, a time-out, HTTP 429 or 5xx. Default: 3; for `prompt`, `embed` and
            `classify` 5 for each row. HTTP 429 does not count while other rows of the call are
            answered, so an endpoint with a rate limit sets the pace.
        retry_on: Additional exception classes, or their names, to treat as transient. With
            "InvalidAnswer", a row whose answer does not fit is retried with the same prompt.
        timeout_s: Time limit in seconds for a call, or for a row in `map` and `prompt`. A worker
            that exceeds it is replaced. Rows that hang or kill their workers are isolated like rows
            that raise.
        explain_errors: For `prompt`: how often a model is asked again with the reason why its
            answer does not fit.

    Raises:
        DefinitionError: If a value is invalid.
    """

    on_error: OnError | None = None
    max_error_rate: float | None = None
    max_retries: int | None = None
    retry_on: Sequence[type[BaseException] | str] = ()
    timeout_s: float | None = None
    explain_errors: int = 0

    def __post_init__(self) -> None:
        expected = "a share from 0 to 1"
        share = functools.partial(number, expected=expected, fits=lambda given: 0 <= given <= 1)
        _validate(
            self,
            on_error=_choice(OnError),
            max_error_rate=share,
            max_retries=whole,
            retry_on=_error_names,
            timeout_s=seconds,
            explain_errors=functools.partial(positive, default=0, least=0),
        )

    def _resolved(self, on_error: OnError | None, max_retries: int) -> Failures:
        """Return the record with defaults for what it leaves open."""
        retries = max_retries if self.max_retries is None else self.max_retries
        return replace(self, on_error=self.on_error or on_error or "raise", max_retries=retries)


@checked_record("reuse", "vd.Reuse")
@dataclass(frozen=True)
class Reuse:
    """Which stored results of a stage are used again.

    ``reuse="rows"`` is short for ``reuse=vd.Reuse("rows")``.

    With "rows", the values that the code reads are compared bit by bit: ``-0.0`` differs from
    ``0.0``, null from an empty text, ``INTEGER`` from ``BIGINT``. Row keys have 128 bits (XXH3, not
    a cryptographic hash). The function receives only the columns that it names.

    A row is looked up among the rows of its fragment, in the results of its partition that are in
    force or that the run has written, and in the results in force of preceding partitions. Former
    results are not searched. For functions faster than 10 µs a row, other fragments of the same run
    are not searched. Only the columns that the stage makes are copied. Failures are never copied
    from other partitions.

    Attributes:
        mode: "rows": a row is computed only if the values of the columns that the code reads, the
            code, its arguments or the schema have changed. Each output must then depend only on its
            own row. "fragments": all rows of a file, or of part of a file, are computed if any of
            its input has changed. "none": each run computes all rows. Default: "rows" if the
            columns that the code reads are known, and it cannot mix up rows without the id; else
            "fragments".
        partitions: With "rows", the number of preceding partitions in which rows are looked up, the
            nearest first, in addition to the current one. 0 searches only the current one. Time
            windows are ordered by time, other partitions as they are listed. For multi-partitions
            the time dimension decides, and the other keys must be equal.
        per_row: With "rows", whether each row has its own result, for functions that sample. The id
            is then part of the row's key, although the function does not receive it, so a row with
            another id is computed. Default: rows with equal columns share a result; for a prompt,
            only if its temperature is 0.
        version: Replaces the identity of the code, and of the content of files that arguments name.
            An edit then recomputes nothing until the version changes. Arguments without an identity
            count by their type.

    Raises:
        DefinitionError: If a value is invalid.
    """

    mode: ReuseMode | None = None
    partitions: int = 1
    per_row: bool | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        version = functools.partial(text, expected="a non-empty text, such as '2'")
        _validate(
            self,
            mode=_choice(ReuseMode),
            partitions=functools.partial(positive, default=1, least=0),
            per_row=_optional(flag),
            version=_optional(version),
        )

    def _resolved(self, location: str, obstacle: str | None) -> Reuse:
        """Return the record with the mode that it leaves open."""
        mode: ReuseMode = self.mode or ("fragments" if obstacle else "rows")
        if mode == "rows" and obstacle:
            raise DefinitionError(f'{location}: reuse="rows": {obstacle}')
        if self.partitions > 1 and mode != "rows":
            why = "" if self.mode or not obstacle else f", because {obstacle}"
            raise DefinitionError(
                f'{location}: partitions={self.partitions} is for reuse="rows", and the stage has '
                f'reuse="{mode}"{why}'
            )
        return replace(self, mode=mode, per_row=bool(self.per_row) and mode == "rows")


@checked_record("cardinality", "vd.Children")
@dataclass(frozen=True)
class Children:
    """Declare that each row of a batch becomes any number of rows, each with a new id.

    Attributes:
        id: The column of the new id, which identifies the rows in downstream stages. Unless the
            schema has this column, each row gets the id ``<parent id>-<number>``. With each row,
            the function must return the id of the input row that it was made from.

    Raises:
        DefinitionError: If a value is invalid.
    """

    id: str

    def __post_init__(self) -> None:
        text("vd.Children", "id", self.id, "the name of a column")


@checked_record("model", "vd.Model")
@dataclass(frozen=True)
class Model:
    """A model of a provider, with its options, prices and budgets.

    ``model="gpt-4o-mini"`` is short for ``model=vd.Model("gpt-4o-mini")``.

    Attributes:
        name: The provider's name of the model, or the path of its folder; or a server that runs
            it, such as `vd.VLLMServer`, for the provider "openai". Requests go to the replicas of
            the server, preferably on the worker's node.
        options: The provider's options, listed below. Options that cannot change answers, such as
            addresses and limits, are not part of fragment keys. ``server`` is a server that runs
            the model under this name, such as one of its adapters.
        prices: The price of a million tokens by kind: "prompt", "completion", and "cached" for
            prompt tokens that the engine has in its cache. With prices, the metadata has each
            partition's cost, including the cost of answers that do not fit.
        token_budget: Tokens that a run may use, prompts and answers together. A request in a batch
            counts when it is submitted: a token for each four characters of the prompt, and
            `max_tokens`, or 500, for the answer. Once the budget is used up, the run starts no more
            fragments of this stage. Fragments in flight are finished and kept; partitions that need
            more fragments fail.
        cost_budget: The same limit as a cost; requires `prices`.
        mode: "batch" sends requests through the provider's batch API, at half the price. A run
            submits them and ends, and a later run stores the answers, which take up to 24 hours.
            Default: "live". Only for `prompt`, with "openai" and "anthropic".
        adapter: The folder of a LoRA adapter, which is sent to the workers like a `vd.local_file`:
            ``"adapters/reviews"``. With ``"adapters/{column}"``, the column names each row's
            folder; null selects the model without an adapter. Only for `prompt`, with "vllm" and
            ``options={"engine_kwargs": {"enable_lora": True}}``. Adapters share an engine;
            ``max_loras`` is how many compute at the same time, and ``max_lora_rank`` (16) their
            highest rank. An edit of an adapter recomputes the stages, or the rows, that name it.
            With a column, all adapters in the parent folder are listed when the stage is declared,
            and copied to each node; any other value is a row error.
        include_reasoning: Whether to add a column with the model's reasoning, which is null if
            there is none. The answer does not contain it. Only for `prompt`; refused for a provider
            that returns no reasoning. The provider must also be asked for it. "openai": as the
            endpoint expects in `sampling_params`, such as ``reasoning_effort``; OpenAI's own
            endpoint returns only the number of tokens. "anthropic": ``sampling_params={"thinking":
            {"type": "enabled", "budget_tokens": 2048}}``. "vllm":
            ``engine_kwargs={"reasoning_parser": "qwen3"}``; `vd.VLLMServer`: the flag
            ``reasoning_parser``.

    Options of "openai" and "anthropic":

    - `base_url`: The endpoint; for "openai" including ``/v1``.
    - `api_key_env`: The variable that holds the key. Default: ``OPENAI_API_KEY`` or
      ``ANTHROPIC_API_KEY``; None for an endpoint without a key.
    - `timeout`: Time limit of a request in seconds. Default: 600.
    - `max_connections`: Requests in flight from one worker to one endpoint. Default: 64.
    - `requests_per_minute`, `tokens_per_minute`: Limits for all workers together; each gets an even
      share.
    - `extra_body`: Additional fields of each request, such as vLLM's
      ``{"structured_outputs": {"regex": "[A-Z]{3}"}}``; also a key of `sampling_params`.
      Where several set a field, the ``extra_body`` of `sampling_params` wins, then
      `sampling_params`, the ``extra_body`` of the model, and `return_format`.

    Without `max_tokens`, "anthropic" sets 4096. A `return_format` is a tool there, which the model
    must call, or with extended thinking may call.

    Options of "vllm":

    - `engine_kwargs`: Arguments of vLLM's ``AsyncEngineArgs``. Unknown ones fail the stage.
    - `tensor_parallel_size`: Default: the GPUs of the worker, divided by ``pipeline_parallel_size``
      of `engine_kwargs`.
    - `revision`, `chat_template`, `chat_template_kwargs`: The model's revision, another template,
      and its arguments, such as ``{"enable_thinking": False}``.

    Options of "transformers":

    - `batch_size`: Prompts of one call of the model. Default: 16.
    - `revision`, `dtype`, `device`, `chat_template_kwargs`: As in transformers.

    Raises:
        DefinitionError: If a value is invalid.
    """

    name: str | os.PathLike[str] | ModelServer
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    prices: Mapping[str, float] | None = field(default=None, hash=False)
    token_budget: int | None = None
    cost_budget: float | None = None
    mode: ModelMode | None = None
    adapter: str | os.PathLike[str] | None = None
    include_reasoning: bool = False

    def __post_init__(self) -> None:
        _validate(self, options=mapping, token_budget=positive, mode=_choice(ModelMode))
        _validate(self, adapter=_optional(_folder), include_reasoning=flag)
        expected = "an amount above 0"
        amount = functools.partial(number, expected=expected, fits=lambda given: given > 0)
        _validate(self, prices=_prices, cost_budget=amount)
        if self.cost_budget is not None and not self.prices:
            raise DefinitionError(f"vd.Model: cost_budget={self.cost_budget} needs prices")


@checked_record("asset", "vd.Asset")
@dataclass(frozen=True)
class Asset:
    """Additional attributes of a stage's Dagster asset, most of them as in `dg.AssetSpec`.

    Attributes:
        description: Markdown. Default: the docstring of the stage's code.
        group_name: The asset's group. Default: the pipeline's group.
        owners: Email addresses and teams.
        tags: Tags, by their names.
        kinds: Kinds, in addition to the stage's own kind.
        metadata: Metadata of the definition.
        deps: Additional assets that it depends on. They are not read.
        automation_condition: When Dagster requests runs of it.
        freshness_policy: How fresh it should be.
        checks: Checks of its rows, from `vd.checks`.
    """

    description: str | None = None
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    kinds: Collection[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    deps: Sequence[Any] = ()
    automation_condition: Any = None
    freshness_policy: Any = None
    checks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        listed = functools.partial(positional, expected="a list")
        _validate(
            self,
            owners=_sorted_names,
            tags=mapping,
            kinds=_sorted_names,
            metadata=mapping,
            deps=listed,
            checks=listed,
        )


def refuse_for_prompts(location: str, failures: Failures, model: Any = None) -> None:
    """Refuse what only prompts have."""
    given = {"explain_errors": failures.explain_errors}
    if isinstance(model, Model):
        own = [each.name for each in fields(Model) if each.name not in ("name", "options")]
        given |= {name: getattr(model, name) for name in own}
    if wrong := [name for name, value in given.items() if value]:
        raise DefinitionError(f"{location}: {names(wrong)} is for prompts; leave it out")


def as_asset(location: str, value: Any) -> Asset:
    """Return the argument `asset` of a stage, or the record of its default."""
    if value is None or isinstance(value, Asset):
        return value or Asset()
    raise DefinitionError(f"{location}: asset is a {type(value).__name__}; expected vd.Asset(...)")


@dataclass(frozen=True)
class StageOptions:
    """The arguments that all stages with workers take."""

    include: IncludeColumns
    workers: Workers
    gpus: float | None
    failures: Failures
    reuse: Reuse
    asset: Asset


class StageArguments(TypedDict, total=False):
    """The arguments that all stages with workers take; see `MapRows.map_batches`."""

    include_columns: bool | Sequence[str]
    concurrency: int | tuple[int, int] | Literal["auto"] | Workers | None
    gpus: float | None
    on_error: OnError | Failures | None
    reuse: ReuseMode | Reuse | None
    asset: Asset | None


class CodeArguments(StageArguments, total=False):
    """Those of a stage that calls the user's code."""

    fn_kwargs: Mapping[str, Any] | None
    fn_constructor_args: Sequence[Any]
    fn_constructor_kwargs: Mapping[str, Any] | None


def parse_options(location: str, given: StageArguments) -> StageOptions:
    """Validate the arguments that all stages with workers take."""
    workers, failures = given.get("concurrency"), given.get("on_error")
    if not isinstance(workers, Workers):
        workers = Workers(parse_workers(location, "concurrency", workers))
    if not isinstance(failures, Failures):
        failures = Failures(_choice(OnError)(location, "on_error", failures))
    reuse = given.get("reuse")
    if not isinstance(reuse, Reuse):
        reuse = Reuse(_choice(ReuseMode)(location, "reuse", reuse))
    include = parse_include(location, given.get("include_columns", ()))
    asset = as_asset(location, given.get("asset"))
    return StageOptions(include, workers, given.get("gpus"), failures, reuse, asset)
