"""What stages are given beside their inputs: choices, resources, workers' lives, failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import pyarrow as pa

from vane_dagster._arguments import one_of, positive, seconds
from vane_dagster.errors import DefinitionError, names

STARTUP_SECONDS = 1800.0
"""How long a model may take to be constructed where a stage says nothing of it."""


@dataclass(frozen=True)
class Upkeep:
    """When a worker is given up, or made anew.

    Attributes:
        startup_timeout_s: Seconds that the construction of its model may take.
        max_batches: Batches after which it is replaced.
        max_rss: Bytes of memory of its own after which it is replaced.
    """

    startup_timeout_s: float = STARTUP_SECONDS
    max_batches: int | None = None
    max_rss: int | None = None


def parse_upkeep(
    culprit: str, startup_timeout_s: Any, max_batches_per_actor: Any, max_rss: Any
) -> Upkeep:
    """Validates the arguments.

    Raises:
        DefinitionError: If one does not fit.
    """
    return Upkeep(
        seconds(culprit, "startup_timeout_s", startup_timeout_s) or STARTUP_SECONDS,
        positive(culprit, "max_batches_per_actor", max_batches_per_actor),
        positive(culprit, "max_rss", max_rss),
    )


BatchFormat = Literal["pyarrow", "numpy", "pandas"]
Cardinality = Literal["one_to_one", "filter", "one_to_many", "zero_to_many"]
JoinHow = Literal["inner", "left"]
Children = Literal["rows", "list"]
OnError = Literal["raise", "quarantine", "null"]

AUTO: Final = "auto"
"""The batch size that a worker finds by itself."""


@dataclass(frozen=True)
class AssetOptions:
    """What a stage's Dagster asset is given beside what vane_dagster knows; see `dg.AssetSpec`."""

    description: str | None = None
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    deps: Sequence[Any] = ()
    automation_condition: Any = None
    freshness_policy: Any = None
    checks: Sequence[Any] = ()


def asset_options(culprit: str, options: dict[str, Any]) -> AssetOptions:
    """What a stage's asset is given, from the arguments that the stage itself does not know.

    Raises:
        DefinitionError: If there is no such argument.
    """
    try:
        return AssetOptions(**options)
    except TypeError:
        unknown = sorted(set(options) - set(AssetOptions.__dataclass_fields__))
        raise DefinitionError(
            f"{culprit}: unknown argument {names(unknown)}; beside its own arguments a stage takes "
            f"{', '.join(AssetOptions.__dataclass_fields__)}"
        ) from None


@dataclass(frozen=True)
class Resources:
    """What one worker of a stage reserves on the cluster.

    Attributes:
        num_cpus: CPUs, 0 to reserve none.
        gpus: GPUs, fractions allowed.
        memory: Bytes of heap memory.
        accelerator_type: For example "A100".
        custom: The cluster's own resource names.
    """

    num_cpus: float = 0
    gpus: float = 0
    memory: int = 0
    accelerator_type: str | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """The non-zero amounts under Ray's resource names."""
        amounts = {"CPU": self.num_cpus, "GPU": self.gpus, "memory": self.memory, **self.custom}
        if self.accelerator_type:
            amounts[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {name: float(amount) for name, amount in amounts.items() if amount}

    def validate(self, where: str) -> None:
        """Raises DefinitionError for a negative amount, or one that Ray would not take."""
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


@dataclass(frozen=True)
class Failures:
    """What becomes of calls and rows that fail.

    Attributes:
        on_error: What becomes of a row at fault.
        max_error_rate: The share of a partition's rows that may be.
        max_retries: How often a call is tried again after an error that may pass.
        retry_on: Names of further classes of errors that may pass.
        timeout_s: Seconds that a call may take; None for as long as it will.
    """

    on_error: OnError = "raise"
    max_error_rate: float = 0.01
    max_retries: int = 3
    retry_on: tuple[str, ...] = ()
    timeout_s: float | None = None


class RowOrder(Protocol):
    """An order in which a model is best asked about rows; it changes no result.

    It is pickled for workers that have none of the user's modules.
    """

    def keys(self, rows: pa.Table) -> Sequence[tuple[str, str]]:
        """For each row its group, which one worker had better have whole, and its rank there."""


def parse_failures(
    culprit: str,
    on_error: OnError,
    max_error_rate: float,
    max_retries: int,
    retry_on: Sequence[type[BaseException] | str],
    timeout_s: float | None,
) -> Failures:
    """Validates the arguments.

    Raises:
        DefinitionError: If one does not fit.
    """
    one_of(culprit, "on_error", on_error, ("raise", "quarantine", "null"))
    number = isinstance(max_error_rate, (int, float)) and not isinstance(max_error_rate, bool)
    if not number or not 0 <= max_error_rate <= 1:
        raise DefinitionError(
            f"{culprit}: max_error_rate is {max_error_rate!r}; expected a share from 0 to 1"
        )
    if type(max_retries) is not int or max_retries < 0:
        raise DefinitionError(
            f"{culprit}: max_retries is {max_retries!r}; expected a whole number from 0 up"
        )
    if isinstance(retry_on, (str, type)):
        raise DefinitionError(f"{culprit}: retry_on is {retry_on!r}; expected a list of classes")
    names = tuple(_name(culprit, kind) for kind in retry_on)
    limit = seconds(culprit, "timeout_s", timeout_s)
    return Failures(on_error, float(max_error_rate), max_retries, names, limit)


def _name(culprit: str, kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind.__qualname__
    if isinstance(kind, str) and kind:
        return kind.rpartition(".")[2]
    raise DefinitionError(
        f"{culprit}: retry_on holds {kind!r}; expected exception classes or their names"
    )
