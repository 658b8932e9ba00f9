"""Options of stages besides their inputs: choices, resources, worker lifecycle, failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Union

from vane_dagster._arguments import list_of_names, number
from vane_dagster.retries import OnError as OnError

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


def check_amount(where: str, name: str, amount: Any) -> None:
    """Raise DefinitionError for an amount of a resource that Ray rejects."""

    def fits(given: float) -> bool:
        is_part = given <= 1 or given == int(given) or name != "gpus"
        return given == 0 or (_LEAST <= given < _INFINITE and is_part)

    expected = f"0 or a number from {_LEAST} up" + (", above 1 a whole one" * (name == "gpus"))
    number(where, name, amount, expected, fits)


def parse_include(location: str, include: Any) -> IncludeColumns:
    """Validate the argument ``include_columns``."""
    if isinstance(include, bool):
        return True if include else ()
    return tuple(list_of_names(location, "include_columns", include) or ())


TOKENS, COST = "_vane_tokens", "_vane_cost"
"""The columns of a row's provenance that need the usage of a model's answers, and its prices."""
