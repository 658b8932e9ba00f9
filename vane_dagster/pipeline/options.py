"""What stages are given beside their inputs: choices, resources, what becomes of failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import pyarrow as pa

from vane_dagster.errors import DefinitionError, names

BatchFormat = Literal["pyarrow", "numpy", "pandas"]
Cardinality = Literal["one_to_one", "filter", "one_to_many", "zero_to_many"]
JoinHow = Literal["inner", "left"]
WriteFormat = Literal["parquet", "delta"]
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
