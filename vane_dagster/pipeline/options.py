"""Options of stages besides their inputs: choices, resources, worker lifecycle, failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Union

from vane_dagster._arguments import list_of_names, number, text
from vane_dagster.errors import DefinitionError
from vane_dagster.retries import OnError as OnError

if TYPE_CHECKING:
    import pyarrow as pa

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


BatchFormat = Literal["pyarrow", "numpy", "pandas", "torch", "polars"]
Cardinality = Literal["one_to_one", "filter", "zero_to_many"]
JoinHow = Literal["inner", "left"]
JoinChildren = Literal["rows", "list"]
ReuseMode = Literal["rows", "fragments", "none"]

ExecutionBackend = Literal["ray_actor", "ray_task", "subprocess_actor", "subprocess_task"]
IncludeColumns = Union[Literal[True], tuple[str, ...]]
"""Input columns that a stage passes on beside what it makes: names, or True for all."""

AUTO: Final = "auto"
"""The batch size of a stage that lets its workers determine it."""
_INFINITE = float("inf")
_LEAST = 0.0001
"""The least amount of a resource that Ray reserves."""


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
        check_amount(where, "num_cpus", self.num_cpus)
        check_amount(where, "gpus", self.gpus)
        check_amount(where, "memory", self.memory)
        for name, amount in self.custom.items():
            check_amount(where, name, amount)
        if self.accelerator_type is not None:
            text(where, "accelerator_type", self.accelerator_type, "a name")
        if taken := sorted(set(self.custom) & {"CPU", "GPU", "memory"}):
            raise DefinitionError(
                f"{where}: resources names {taken[0]!r}; use num_cpus, gpus or memory for it"
            )


def check_amount(where: str, name: str, amount: Any) -> None:
    """Raise DefinitionError for an amount of a resource that Ray rejects."""
    number(where, name, amount, "a number from 0 up", lambda given: 0 <= given < _INFINITE)
    if 0 < amount < _LEAST:
        raise DefinitionError(f"{where}: {name} is {amount!r}; the least is {_LEAST}")
    if name == "gpus" and amount > 1 and amount != int(amount):
        raise DefinitionError(
            f"{where}: gpus is {amount}; above one GPU only whole numbers can be reserved"
        )


class RowOrder(Protocol):
    """An order in which a model processes rows most efficiently; it changes no result.

    It is pickled for workers that have none of the user's modules.
    """

    def keys(self, rows: pa.Table) -> Sequence[tuple[str, str]]:
        """Return each row's group, ideally given to one worker as a whole, and its rank there."""


def parse_include(location: str, include: Any) -> IncludeColumns:
    """Validate the argument ``include_columns``."""
    if isinstance(include, bool):
        return True if include else ()
    return tuple(list_of_names(location, "include_columns", include) or ())
