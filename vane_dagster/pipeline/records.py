"""Records of the arguments of stages that few stages need: workers, failures, reuse and so on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from vane_dagster._arguments import (
    flag,
    list_of_names,
    mapping,
    number,
    one_of,
    parse_concurrency,
    positive,
    seconds,
    text,
    whole,
)
from vane_dagster._keywords import checked_record
from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.options import (
    STARTUP_SECONDS,
    ExecutionBackend,
    IncludeColumns,
    OnError,
    Resources,
    ReuseMode,
    WorkerLifecycle,
    parse_include,
)
from vane_dagster.providers.usage import parse_budget, parse_prices

if TYPE_CHECKING:
    from vane_dagster.pipeline.servers import ModelServer


@checked_record("vd.Workers")
@dataclass(frozen=True)
class Workers:
    """The workers of a stage: how many there are, what each reserves, and how it runs.

    ``concurrency=4`` is short for ``concurrency=vd.Workers(4)``.

    Attributes:
        count: The number of workers, or (min, max) depending on the cluster's free resources.
            Default: 1 for a class, up to the cluster's CPUs for a function.
        num_cpus: CPUs that a worker reserves. Default: what the decorator of its code says, or 0.
        memory: Bytes of memory that a worker reserves.
        accelerator_type: The GPU type, as Ray names it, such as "A100".
        resources: Custom cluster resources that a worker reserves.
        max_concurrency: Calls of an async function that run at the same time in one worker, default
            16; for `prompt` and `embed`, batches. A worker makes one call of a synchronous function
            at a time, so there it is the number of workers.
        startup_timeout_s: Time limit in seconds for constructing the class in a worker. The error
            says what the worker was executing. Default: 1800.
        max_batches: Calls after which a worker is replaced by a new one, for models or libraries
            that leak memory.
        max_rss: Bytes of memory after which a worker is replaced, between two calls. Counts the
            private memory of its processes, without mapped files and shared tables.
        env_vars: Names of environment variables. Their values are sent to the worker with each run,
            and never stored, keyed or logged.
        keyed_env_vars: The same for variables that change results, such as the language of a model.
            A new value makes new fragment keys and new workers. Only a digest of the value is used,
            and nothing of it is stored or logged. Do not name secrets: rotating a secret would
            recompute everything.
        execution_backend: Where the workers run: "ray_actor" (a class) or "ray_task" (a function)
            on the Ray cluster; "subprocess_actor" or "subprocess_task" on the machine of the run,
            while other stages run on the cluster: for code that needs a license, device or service
            of that machine. Default: where the compute resource says.

    Raises:
        DefinitionError: If a value is invalid.
    """

    count: int | tuple[int, int] | None = None
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
        where = "vd.Workers"
        object.__setattr__(self, "count", parse_concurrency(where, self.count, "count"))
        object.__setattr__(self, "resources", mapping(where, "resources", self.resources))
        self._reserved(where, 0)
        for name in ("max_concurrency", "max_batches", "max_rss"):
            positive(where, name, getattr(self, name))
        seconds(where, "startup_timeout_s", self.startup_timeout_s)
        for name in ("env_vars", "keyed_env_vars"):
            listed = list_of_names(where, name, getattr(self, name)) or ()
            if wrong := [each for each in listed if not each or "=" in each]:
                raise DefinitionError(  # the value may be a secret
                    f"{where}: {name} has {wrong[0].partition('=')[0]!r} with a value, or an empty "
                    "name; expected names alone, whose values are those of the driver"
                )
            object.__setattr__(self, name, tuple(dict.fromkeys(listed)))
        if self.execution_backend is not None:
            backends = get_args(ExecutionBackend)
            one_of(where, "execution_backend", self.execution_backend, backends)

    def _reserved(self, where: str, gpus: float) -> Resources:
        """Return what a worker reserves."""
        own = self.resources
        found = Resources(self.num_cpus or 0, gpus, self.memory, self.accelerator_type, own)
        found.validate(where)
        return found

    @property
    def _lifecycle(self) -> WorkerLifecycle:
        """When a worker is given up, or replaced."""
        startup = STARTUP_SECONDS if self.startup_timeout_s is None else self.startup_timeout_s
        return WorkerLifecycle(float(startup), self.max_batches, self.max_rss)

    @property
    def _env_vars(self) -> tuple[str, ...]:
        """The environment variables that are sent to the workers, including keyed ones."""
        return tuple(dict.fromkeys((*self.env_vars, *self.keyed_env_vars)))

    def _of(self, location: str, gpus: float, stateful: bool, name: str) -> Workers:
        """Return the workers of a class or of a function."""
        self._reserved(location, gpus)
        place, _, kind = (self.execution_backend or "").partition("_")
        fits = "actor" if stateful else "task"
        if kind not in ("", fits):
            raise DefinitionError(
                f"{location}: execution_backend={self.execution_backend!r}, but {name} is "
                + ("constructed once and stays loaded" if stateful else "a function")
                + f'; write execution_backend="{place}_{fits}"'
                + ("" if stateful else ", or make it a class that loads what it needs in __init__")
            )
        return replace(self, count=self.count or ((1, 1) if stateful else None))


@checked_record("vd.Failures")
@dataclass(frozen=True)
class Failures:
    """How failed calls and failed rows of a stage are handled.

    ``on_error="quarantine"`` is short for ``on_error=vd.Failures("quarantine")``.

    Attributes:
        on_error: How a failed batch is handled. "raise", the default, fails the partition.
            "quarantine" halves the batch until the failed rows are isolated, stores those with
            their errors beside the output, and continues. "null" keeps them in the output as nulls,
            with the error in a column "error".
        max_error_rate: The share of a partition's rows that may fail. Beyond it, the partition
            fails, and if all rows fail, unless it is 1. Default: 0.01, or 10 rows if that is more.
        max_retries: Retries of a call, with exponential backoff, after a transient error: a
            connection error, a time-out, HTTP 429 or 5xx. Default: 3; for `prompt`, `embed` and
            `classify` 5, of a row.
        retry_on: Further exception classes, or their names, to treat as transient. With
            "InvalidAnswer", a row with an answer that does not fit is retried with the same prompt.
        timeout_s: Time limit of a call in seconds; of a row in `map`. A worker that exceeds it is
            replaced. Rows that hang or kill their workers are isolated like rows that raise.
        explain_errors: For `prompt`: how often to send a model the reason why its answer does not
            fit, and ask again.

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
        where, rate = "vd.Failures", self.max_error_rate
        if self.on_error is not None:
            one_of(where, "on_error", self.on_error, get_args(OnError))
        number(where, "max_error_rate", rate, "a share from 0 to 1", lambda given: 0 <= given <= 1)
        whole(where, "max_retries", self.max_retries)
        whole(where, "explain_errors", self.explain_errors)
        object.__setattr__(self, "explain_errors", self.explain_errors or 0)
        seconds(where, "timeout_s", self.timeout_s)
        if not isinstance(self.retry_on, (list, tuple)):
            raise DefinitionError(
                f"{where}: retry_on is {self.retry_on!r}; expected a list of classes"
            )
        object.__setattr__(self, "retry_on", tuple(_name(where, kind) for kind in self.retry_on))

    def _resolved(self, on_error: OnError | None, max_retries: int) -> Failures:
        """Return the record with defaults for what it leaves open."""
        retries = max_retries if self.max_retries is None else self.max_retries
        return replace(self, on_error=self.on_error or on_error or "raise", max_retries=retries)


@checked_record("vd.Reuse")
@dataclass(frozen=True)
class Reuse:
    """Which stored results of a stage are used again.

    ``reuse="rows"`` is short for ``reuse=vd.Reuse("rows")``.

    Attributes:
        mode: "rows": a row is computed only if the values of the columns that the code reads, the
            code, its arguments or the schema changed. Each output then has to depend on its own row
            alone. "fragments": the rows of a file, or part of it, are computed if one of them
            changed, or anything else in the input. "none": each run computes all rows. Default:
            "rows" if the columns that the code reads are known, and it cannot mix up rows without
            the id; else "fragments".
        partitions: With "rows", the number of preceding partitions in which rows are looked up,
            besides the row's own. 0: its own alone.
        per_row: With "rows", whether each row has a result of its own, as from a function that
            samples. Default: rows with equal columns share a result; those of a prompt do if its
            temperature is 0.
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
        where = "vd.Reuse"
        if self.mode is not None:
            one_of(where, "mode", self.mode, get_args(ReuseMode))
        if type(self.partitions) is not int or self.partitions < 0:
            raise DefinitionError(
                f"{where}: partitions is {self.partitions!r}; expected a whole number from 0 up"
            )
        if self.per_row is not None:
            flag(where, "per_row", self.per_row)
        if self.version is not None:
            text(where, "version", self.version, "a non-empty text, such as '2'")

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


@checked_record("vd.Children")
@dataclass(frozen=True)
class Children:
    """That each row of a batch becomes any number of rows, which have an id of their own.

    Attributes:
        id: The column of the new id, which keys the downstream stages. Unless the schema has it,
            each row gets ``<parent id>-<number>``.
        parent_id: The column returned by the function with the id of the parent row. Default: the
            input's id.

    Raises:
        DefinitionError: If a value is invalid.
    """

    id: str
    parent_id: str | None = None

    def __post_init__(self) -> None:
        text("vd.Children", "id", self.id, "the name of a column")
        if self.parent_id is not None:
            text("vd.Children", "parent_id", self.parent_id, "the name of a column")


@checked_record("vd.Model")
@dataclass(frozen=True)
class Model:
    """A model of a provider, with its options, prices and budgets.

    ``model="gpt-4o-mini"`` is short for ``model=vd.Model("gpt-4o-mini")``.

    Attributes:
        name: The model's name, as the provider knows it; or a server that runs it, such as
            `vd.VLLMServer`, for the provider "openai". Its replicas get the requests, on the
            worker's node first.
        options: Passed to the provider; see its class. Options that cannot change answers, such as
            addresses and limits, are not part of fragment keys. ``server`` is a server that runs
            the model by this name, such as an adapter.
        prices: The price of a million tokens by kind: "prompt", "completion", and "cached" for
            prompt tokens that the engine has in its cache. With prices, the metadata has each
            partition's cost, including that of answers that do not fit.
        token_budget: Tokens that a run may use, prompts and answers together. Once they are used
            up, the run starts no more fragments of this stage. Fragments in flight are finished and
            kept; partitions that need more fragments fail.
        cost_budget: The same as a cost; requires `prices`.

    Raises:
        DefinitionError: If a value is invalid.
    """

    name: str | ModelServer
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    prices: Mapping[str, float] | None = field(default=None, hash=False)
    token_budget: int | None = None
    cost_budget: float | None = None

    def __post_init__(self) -> None:
        where = "vd.Model"
        object.__setattr__(self, "options", mapping(where, "options", self.options))
        prices = parse_prices(where, self.prices)
        positive(where, "token_budget", self.token_budget)
        parse_budget(where, self.cost_budget, prices)


@checked_record("vd.Asset")
@dataclass(frozen=True)
class Asset:
    """What a stage's Dagster asset has besides its rows; most of it as in `dg.AssetSpec`.

    Attributes:
        description: Markdown. Default: the docstring of the stage's code.
        group_name: The asset's group. Default: that of the pipeline.
        owners: Email addresses and teams.
        tags: Tags, by their names.
        kinds: Kinds, in addition to that of the stage.
        metadata: Metadata of the definition.
        deps: Further assets that it depends on. They are not read.
        automation_condition: When Dagster requests runs of it.
        freshness_policy: How fresh it should be.
        checks: Checks of its rows, from `vd.checks`.
        column_lineage: The input columns that output columns depend on, shown in Dagster. Default:
            all columns that the stage reads.
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
    column_lineage: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        given = mapping("vd.Asset", "column_lineage", self.column_lineage)
        lineage = {
            name: list_of_names("vd.Asset", f"column_lineage[{name!r}]", listed) or ()
            for name, listed in given.items()
        }
        object.__setattr__(self, "column_lineage", lineage)
        for name in ("tags", "metadata"):
            object.__setattr__(self, name, mapping("vd.Asset", name, getattr(self, name)))
        for name in ("owners", "kinds"):
            value = getattr(self, name)
            value = sorted(value) if isinstance(value, (set, frozenset)) else value
            object.__setattr__(self, name, list_of_names("vd.Asset", name, value) or ())
        for name in ("deps", "checks"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise DefinitionError(
                    f"vd.Asset: {name} is a {type(value).__name__}; expected a list"
                )
            object.__setattr__(self, name, tuple(value))


def _name(location: str, kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind.__qualname__
    if isinstance(kind, str) and (name := kind.rpartition(".")[2]):
        return name
    raise DefinitionError(
        f"{location}: retry_on holds {kind!r}; expected exception classes or their names"
    )


def refuse_for_prompts(location: str, failures: Failures, model: Any = None) -> None:
    """Refuse what only prompts have."""
    given = {"explain_errors": failures.explain_errors}
    if isinstance(model, Model):
        given |= {name: getattr(model, name) for name in ("prices", "token_budget", "cost_budget")}
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


def parse_options(
    location: str,
    include_columns: bool | Sequence[str],
    concurrency: int | tuple[int, int] | Workers | None,
    gpus: float | None,
    on_error: OnError | Failures | None,
    reuse: ReuseMode | Reuse | None,
    asset: Asset | None,
) -> StageOptions:
    """Validate the arguments that all stages with workers take."""
    if not isinstance(concurrency, Workers):
        concurrency = Workers(parse_concurrency(location, concurrency))
    if not isinstance(on_error, Failures):
        on_error = Failures(on_error and one_of(location, "on_error", on_error, get_args(OnError)))
    if not isinstance(reuse, Reuse):
        reuse = Reuse(reuse and one_of(location, "reuse", reuse, get_args(ReuseMode)))
    include = parse_include(location, include_columns)
    return StageOptions(include, concurrency, gpus, on_error, reuse, as_asset(location, asset))


RECORDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    argument: (f"vd.{record.__name__}", tuple(each.name for each in fields(record)))
    for argument, record in {
        "concurrency": Workers,
        "on_error": Failures,
        "reuse": Reuse,
        "cardinality": Children,
        "model": Model,
        "asset": Asset,
    }.items()
}
"""The record that an argument of a stage takes, and the record's fields."""
