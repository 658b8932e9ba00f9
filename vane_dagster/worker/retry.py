"""A batch and what to do where it fails: try again, halve it, or set single rows aside.

One generator decides, so that the same holds for synchronous and asynchronous code. It yields what
is to be done next and is sent what came of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Union

import pyarrow as pa

from vane_dagster.errors import CostlyError, StageError, names
from vane_dagster.pipeline.options import OnError
from vane_dagster.storage.transient_errors import is_transient, waiting_time
from vane_dagster.worker.frameworks import free_memory, is_out_of_memory

_MOST_IDS = 5

RowLoss = Literal["WorkerDied", "TimeoutError"]
WORKER_DIED: Final = "WorkerDied"
"""What a row is at fault of that kills the process it is computed in."""
TIMED_OUT: Final = "TimeoutError"
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
    kind: RowLoss | None = None

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
        mixed: Whether rows were tried again alone, so that the others came out before them.
        wasted: What failed rows took all the same; see `CostlyError`.
    """

    tables: list[pa.Table] = field(default_factory=list)
    faults: list[tuple[int, RowFault]] = field(default_factory=list)
    retries: int = 0
    fits: int | None = None
    mixed: bool = False
    wasted: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Partial:
    """What a call gave for some rows of a batch, and the errors of the others.

    Attributes:
        table: What came out, in the batch's order.
        errors: What was raised, by place in the batch.
    """

    table: pa.Table
    errors: Mapping[int, BaseException]


Step = Union[Call, Wait]
Answer = Union[pa.Table, Partial, BaseException, None]


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
    waiting = [(batch, 1)]
    while waiting:
        rows, attempts = waiting.pop(0)
        answer = yield Call(rows)
        assert answer is not None
        if isinstance(answer, Partial):
            outcome.tables.append(answer.table)
            outcome.mixed = True
            errors, alone = answer.errors, True
            for error in errors.values():
                if isinstance(error, CostlyError):
                    outcome.wasted.update(error.used)
        elif isinstance(answer, BaseException):
            if is_out_of_memory(answer):
                free_memory()
            errors, alone = dict.fromkeys(range(rows.num_rows), answer), rows.num_rows == 1
        else:
            outcome.tables.append(answer)
            continue
        for place, error in errors.items():
            if isinstance(error, StageError):
                raise BatchError(rows.slice(place, 1) if alone else rows, id, error)
        passing = {i: e for i, e in errors.items() if is_transient(e, policy.retry_on)}
        if passing and attempts <= policy.max_retries:
            yield Wait(max(waiting_time(error, attempts) for error in set(passing.values())))
            outcome.retries += 1
            again = rows if len(passing) == rows.num_rows else rows.take([*passing])
            waiting.insert(0, (again, attempts + 1))
            errors = {i: error for i, error in errors.items() if i not in passing}
        elif not alone:
            error = errors[0]
            if halves := _halves(rows, error, policy, outcome):
                waiting[:0] = [(half, 1) for half in halves]
                continue
            raise BatchError(rows, id, error)
        for place, error in errors.items():
            row = rows.slice(place, 1)
            outcome.faults.append((len(outcome.tables), RowFault(row, error, attempts)))
            if policy.on_error == "raise" or len(outcome.faults) > most_faults:
                raise BatchError(row, id, error)
    return outcome


def _halves(
    rows: pa.Table, error: BaseException, policy: Policy, outcome: Outcome
) -> list[pa.Table]:
    """The halves that a batch is cut into after an error of it as a whole; none if it is not."""
    half = rows.num_rows // 2
    if is_out_of_memory(error):
        outcome.fits = min(half, outcome.fits or half)
    elif policy.on_error == "raise":
        return []
    return [rows.slice(0, half), rows.slice(half)]


class BatchError(Exception):
    """A batch that failed for good, with some of its ids; `cause` is what was raised."""

    def __init__(self, rows: pa.Table, id: str, cause: BaseException) -> None:
        shown = names(rows.column(id).slice(0, _MOST_IDS + 1).to_pylist(), _MOST_IDS)
        more = rows.num_rows - _MOST_IDS
        if more > 1:
            shown = f"{shown.rpartition(' and ')[0]} and {more} more"
        super().__init__(f"in a batch of {rows.num_rows} rows, ids {shown}")
        self.cause = cause
