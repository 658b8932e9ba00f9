"""Options of stages besides their inputs: choices, resources, worker lifecycle, failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, Union, get_args

import pyarrow as pa

from vane_dagster._arguments import list_of_names, one_of, positive, seconds
from vane_dagster.errors import DefinitionError

STARTUP_SECONDS = 1800.0
"""Default time limit in seconds for the construction of a model."""


@dataclass(frozen=True)
class WorkerLifecycle:
    """When a worker is given up, or replaced.

    Attributes:
        startup_timeout_s: Time limit in seconds for the construction of its model.
        max_batches: Batches after which it is replaced.
        max_rss: Bytes of private memory after which it is replaced.
    """

    startup_timeout_s: float = STARTUP_SECONDS
    max_batches: int | None = None
    max_rss: int | None = None


def parse_lifecycle(
    location: str, startup_timeout_s: Any, max_batches_per_actor: Any, max_rss: Any
) -> WorkerLifecycle:
    """Validate the arguments of a `WorkerLifecycle`.

    Args:
        location: The stage, for messages.
        startup_timeout_s: Seconds; None for `STARTUP_SECONDS`.
        max_batches_per_actor: Batches; None for no limit.
        max_rss: Bytes; None for no limit.

    Raises:
        DefinitionError: If an argument is invalid.
    """
    return WorkerLifecycle(
        seconds(location, "startup_timeout_s", startup_timeout_s) or STARTUP_SECONDS,
        positive(location, "max_batches_per_actor", max_batches_per_actor),
        positive(location, "max_rss", max_rss),
    )


BatchFormat = Literal["pyarrow", "numpy", "pandas", "torch", "polars"]
Cardinality = Literal["one_to_one", "filter", "one_to_many", "zero_to_many"]
JoinHow = Literal["inner", "left"]
Children = Literal["rows", "list"]
OnError = Literal["raise", "quarantine", "null"]
ReuseMode = Literal["rows", "fragments", "none"]

ExecutionBackend = Literal["ray_actor", "ray_task", "subprocess_actor", "subprocess_task"]
IncludeColumns = Union[Literal[True], tuple[str, ...]]
"""Input columns that a stage passes on beside what it makes: names, or True for all."""

AUTO: Final = "auto"
"""The batch size of a stage that lets its workers determine it."""


@dataclass(frozen=True)
class Resources:
    """Resources that one worker of a stage reserves on the cluster.

    Attributes:
        num_cpus: CPUs; 0 reserves none.
        gpus: GPUs; fractions are allowed.
        memory: Bytes of heap memory.
        accelerator_type: For example "A100".
        custom: Amounts by the cluster's own resource names.
    """

    num_cpus: float = 0
    gpus: float = 0
    memory: int = 0
    accelerator_type: str | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """Return the non-zero amounts under Ray's resource names."""
        amounts = {"CPU": self.num_cpus, "GPU": self.gpus, "memory": self.memory, **self.custom}
        if self.accelerator_type:
            amounts[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {name: float(amount) for name, amount in amounts.items() if amount}

    def validate(self, where: str) -> None:
        """Raise DefinitionError for a negative amount, or one that Ray rejects."""
        for name, amount in (
            ("num_cpus", self.num_cpus),
            ("gpus", self.gpus),
            ("memory", self.memory),
            *self.custom.items(),
        ):
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
            if not number or not math.isfinite(amount) or amount < 0:
                raise DefinitionError(f"{where}: {name} is {amount!r}; expected a number from 0 up")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise DefinitionError(
                f"{where}: gpus is {self.gpus}; above one GPU only whole numbers can be reserved"
            )
        if taken := sorted(set(self.custom) & {"CPU", "GPU", "memory"}):
            raise DefinitionError(
                f"{where}: resources names {taken[0]!r}; use num_cpus, gpus or memory for it"
            )


def parse_execution_backend(
    location: str, value: Any, stateful: bool, name: str
) -> ExecutionBackend | None:
    """Validate the argument `execution_backend` of a stage.

    Args:
        location: The stage, for messages.
        value: The argument.
        stateful: Whether the stage has a class, constructed once in each worker.
        name: The class or function, for messages.

    Raises:
        DefinitionError: If the value is unknown, or contradicts the class or function.
    """
    if value is None:
        return None
    found: ExecutionBackend = one_of(
        location, "execution_backend", value, get_args(ExecutionBackend)
    )
    place, _, kind = found.partition("_")
    if stateful and kind == "task":
        raise DefinitionError(
            f"{location}: execution_backend={found!r} is for a function, but {name} is constructed "
            f'once and stays loaded; write execution_backend="{place}_actor"'
        )
    if not stateful and kind == "actor":
        raise DefinitionError(
            f"{location}: execution_backend={found!r} is for a class, but {name} is a function; "
            f'write execution_backend="{place}_task", or make it a class that loads what it needs '
            "in __init__"
        )
    return found


@dataclass(frozen=True)
class Failures:
    """How failed calls and failed rows are handled.

    Attributes:
        on_error: How a failed row is handled.
        max_error_rate: The share of a partition's rows that may fail; None for the default.
        max_retries: Retries of a call after a transient error.
        retry_on: Names of further exception classes to treat as transient.
        timeout_s: Time limit of a call in seconds; None for no limit.
    """

    on_error: OnError = "raise"
    max_error_rate: float | None = None
    max_retries: int = 3
    retry_on: tuple[str, ...] = ()
    timeout_s: float | None = None


@dataclass(frozen=True)
class Reuse:
    """Which stored results of a stage are used again.

    Attributes:
        mode: "rows": a row is computed if its key columns or the row definition changed;
            "fragments": a fragment, if its key changed; "none": each run computes everything.
        partitions: The number of preceding partitions in which rows are looked up.
        per_row: Whether the id counts too, so that equal rows have results of their own.
    """

    mode: ReuseMode = "fragments"
    partitions: int = 1
    per_row: bool = False


class RowOrder(Protocol):
    """An order in which a model processes rows most efficiently; it changes no result.

    It is pickled for workers that have none of the user's modules.
    """

    def keys(self, rows: pa.Table) -> Sequence[tuple[str, str]]:
        """Return each row's group, ideally given to one worker as a whole, and its rank there."""


def parse_include(location: str, include: Any) -> IncludeColumns:
    """Validate the argument ``include_columns``.

    Args:
        location: The stage, for messages.
        include: True for all input columns, False or None for none, or a list of names.

    Raises:
        DefinitionError: If it is none of these.
    """
    if isinstance(include, bool):
        return True if include else ()
    return tuple(list_of_names(location, "include_columns", include) or ())


def parse_failures(
    location: str,
    on_error: OnError,
    max_error_rate: float | None,
    max_retries: int,
    retry_on: Sequence[type[BaseException] | str],
    timeout_s: float | None,
) -> Failures:
    """Validate the arguments of a `Failures`.

    Args:
        location: The stage, for messages.
        on_error: "raise", "quarantine" or "null".
        max_error_rate: A share from 0 to 1; None for the default of `ErrorRate`.
        max_retries: The number of retries.
        retry_on: Exception classes, or their names.
        timeout_s: Seconds; None for no limit.

    Raises:
        DefinitionError: If an argument is invalid.
    """
    one_of(location, "on_error", on_error, ("raise", "quarantine", "null"))
    number = isinstance(max_error_rate, (int, float)) and not isinstance(max_error_rate, bool)
    if max_error_rate is not None and not (number and 0 <= max_error_rate <= 1):
        raise DefinitionError(
            f"{location}: max_error_rate is {max_error_rate!r}; expected a share from 0 to 1"
        )
    if type(max_retries) is not int or max_retries < 0:
        raise DefinitionError(
            f"{location}: max_retries is {max_retries!r}; expected a whole number from 0 up"
        )
    if isinstance(retry_on, (str, type)):
        raise DefinitionError(f"{location}: retry_on is {retry_on!r}; expected a list of classes")
    names = tuple(_name(location, kind) for kind in retry_on)
    limit = seconds(location, "timeout_s", timeout_s)
    rate = None if max_error_rate is None else float(max_error_rate)
    return Failures(on_error, rate, max_retries, names, limit)


def parse_reuse(
    location: str,
    reuse: ReuseMode | None,
    reuse_partitions: int,
    per_row: bool | None,
    obstacle: str | None,
) -> Reuse:
    """Validate the arguments of a `Reuse`.

    Args:
        location: The stage, for messages.
        reuse: "rows", "fragments" or "none"; None for "rows" if there is no obstacle.
        reuse_partitions: The number of preceding partitions in which rows are looked up.
        per_row: Whether equal rows have results of their own; None for False.
        obstacle: Why rows of the stage cannot be reused one by one, and the fix; None if they can.

    Raises:
        DefinitionError: If an argument is invalid.
    """
    if reuse is not None:
        one_of(location, "reuse", reuse, get_args(ReuseMode))
    if type(reuse_partitions) is not int or reuse_partitions < 0:
        raise DefinitionError(
            f"{location}: reuse_partitions is {reuse_partitions!r}; expected a whole number from 0 "
            "up"
        )
    if per_row is not None and not isinstance(per_row, bool):
        raise DefinitionError(f"{location}: per_row is {per_row!r}; expected a bool")
    mode: ReuseMode = reuse or ("fragments" if obstacle else "rows")
    if mode == "rows" and obstacle:
        raise DefinitionError(f'{location}: reuse="rows": {obstacle}')
    if reuse_partitions > 1 and mode != "rows":
        why = "" if reuse or not obstacle else f", because {obstacle}"
        raise DefinitionError(
            f'{location}: reuse_partitions={reuse_partitions} is for reuse="rows", and the stage '
            f'has reuse="{mode}"{why}'
        )
    return Reuse(mode, reuse_partitions, bool(per_row) and mode == "rows")


def _name(location: str, kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind.__qualname__
    if isinstance(kind, str) and kind:
        return kind.rpartition(".")[2]
    raise DefinitionError(
        f"{location}: retry_on holds {kind!r}; expected exception classes or their names"
    )
