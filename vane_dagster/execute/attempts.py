"""A batch and what to do where it fails: try again, halve it, or set single rows aside.

One generator decides, so that the same holds for synchronous and asynchronous code. It yields what
is to be done next and is sent what came of it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Union

import pyarrow as pa

from vane_dagster.commit.transient import class_names, is_transient, waiting_time
from vane_dagster.declare.stage import OnError
from vane_dagster.errors import names

_MOST_IDS = 5

OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "CUDAOutOfMemoryError", "XlaRuntimeError"})
"""Names of classes by which libraries say that a device's memory is used up."""


WORKER_DIED = "WorkerDied"
"""What a row is at fault of that kills the process it is computed in."""
TIMED_OUT = "TimeoutError"
"""What a row is at fault of that takes too long."""


@dataclass(frozen=True)
class Policy:
    """What a stage asks for where its code fails.

    Attributes:
        on_error: What becomes of a row at fault.
        max_retries: How often a call is tried again after an error that may pass.
        retry_on: Names of further classes of such errors.
        timeout_s: Seconds that a call may take; None for as long as it will.
    """

    on_error: OnError = "raise"
    max_retries: int = 3
    retry_on: tuple[str, ...] = ()
    timeout_s: float | None = None


@dataclass(frozen=True)
class Wait:
    """Seconds to wait before the next call."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """A batch to call the user's code with; answered by rows, or by the error that it raised."""

    batch: pa.Table


@dataclass(frozen=True)
class RowFault:
    """A row that cannot be computed.

    Attributes:
        batch: The row, as it was given.
        error: What was raised.
        attempts: Calls that held the row alone.
        kind: What the error is called, where it was not raised.
    """

    batch: pa.Table
    error: BaseException
    attempts: int
    kind: str = ""

    @property
    def name(self) -> str:
        """The error's class."""
        return self.kind or type(self.error).__name__


@dataclass
class Outcome:
    """What came of a batch.

    Attributes:
        tables: Rows that came out, in the batch's order.
        faults: Rows that cannot be computed, each with the number of tables before it.
        retries: Calls that were repeated.
        fits: The largest batch that fitted into memory after one did not; None if all did.
    """

    tables: list[pa.Table] = field(default_factory=list)
    faults: list[tuple[int, RowFault]] = field(default_factory=list)
    retries: int = 0
    fits: int | None = None


Step = Union[Call, Wait]
Answer = Union[pa.Table, BaseException, None]


def attempt(
    batch: pa.Table, policy: Policy, id: str, most_faults: int
) -> Generator[Step, Answer, Outcome]:
    """Decides how a batch is computed.

    Args:
        batch: The rows.
        policy: What the stage asks for.
        id: Name of its id column.
        most_faults: Rows that may be set aside; with one more the error is raised.

    Raises:
        BatchError: With what the user's code raised, where no rows or too many are set aside.
    """
    outcome = Outcome()
    waiting = [batch]
    while waiting:
        rows = waiting.pop(0)
        answer, attempts = yield from _called(rows, policy, outcome)
        if not isinstance(answer, BaseException):
            assert answer is not None
            outcome.tables.append(answer)
            continue
        memory = is_out_of_memory(answer)
        if memory:
            free_memory()
        if rows.num_rows > 1 and (memory or policy.on_error != "raise"):
            half = rows.num_rows // 2
            if memory:
                outcome.fits = min(half, outcome.fits or half)
            waiting[:0] = [rows.slice(0, half), rows.slice(half)]
        elif policy.on_error == "raise":
            raise BatchError(rows, id, answer)
        else:
            outcome.faults.append((len(outcome.tables), RowFault(rows, answer, attempts)))
            if len(outcome.faults) > most_faults:
                raise BatchError(rows, id, answer)
    return outcome


class BatchError(Exception):
    """A batch that failed for good, with some of its ids; `cause` is what was raised."""

    def __init__(self, rows: pa.Table, id: str, cause: BaseException) -> None:
        shown = names(rows.column(id).slice(0, _MOST_IDS + 1).to_pylist(), _MOST_IDS)
        more = rows.num_rows - _MOST_IDS
        if more > 1:
            shown = f"{shown.rpartition(' and ')[0]} and {more} more"
        super().__init__(f"in a batch of {rows.num_rows} rows, ids {shown}")
        self.cause = cause


def _called(
    rows: pa.Table, policy: Policy, outcome: Outcome
) -> Generator[Step, Answer, tuple[Answer, int]]:
    """The answer to a call, tried again as long as its error may pass."""
    attempts = 1
    while True:
        answer = yield Call(rows)
        passing = isinstance(answer, BaseException) and is_transient(answer, policy.retry_on)
        if not passing or attempts > policy.max_retries:
            return answer, attempts
        assert isinstance(answer, BaseException)
        yield Wait(waiting_time(answer, attempts))
        attempts += 1
        outcome.retries += 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory is used up."""
    if isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error):
        return True
    if not class_names(error) & OUT_OF_MEMORY:
        return False
    return type(error).__name__ != "XlaRuntimeError" or "RESOURCE_EXHAUSTED" in str(error)


def free_memory() -> None:
    """Gives back what torch keeps of a device's memory, if it is loaded."""
    import gc
    import sys

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
