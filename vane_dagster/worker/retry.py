"""Handling of a batch that fails: retry it, halve it, or record the failure of single rows.

One coroutine follows the policy, for synchronous and asynchronous code alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Union

import pyarrow as pa

from vane_dagster.errors import CostlyError, StageError, names
from vane_dagster.providers.batch_api import Pending
from vane_dagster.retries import (
    SERVER_DIED,
    Policy,
    after_server_ended,
    http_status,
    seconds_before_alone,
)
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.frameworks import free_memory, is_out_of_memory
from vane_dagster.worker.reports import WorkReport

_TOO_MANY = (
    "more rows failed than vd.Failures(max_error_rate=) allows ({} here, at most {}; "
    "`vane-dagster quarantine` lists them, and the next run computes them again), the last "
)


@dataclass(frozen=True)
class RowFault:
    """A row that failed.

    Attributes:
        batch: The input row.
        error: The error that was raised.
        attempts: Calls with this row alone.
        kind: The name of an error that was not raised here.
        transient: Whether the row may not fail again.
        model: What failed, in place of the stage's class or function.
    """

    batch: pa.Table
    error: BaseException
    attempts: int
    kind: str | None = None
    transient: bool = False
    model: str = ""

    @property
    def name(self) -> str:
        """The name of the error's class."""
        return self.kind or type(self.error).__name__


@dataclass
class BatchOutcome:
    """The outcome of a batch.

    Attributes:
        tables: Output rows, in the batch's order.
        faults: Rows that failed.
        retries: Calls that were repeated; of code that reports its failed rows, such as prompts,
            each of these.
        rate_limited: Of these, those that an endpoint had answered with HTTP 429.
        fits: Rows of the largest batch that may fit into memory after one did not; None if all did.
        mixed: Whether some rows were retried alone, so other rows of the batch may precede them.
        wasted: Amounts spent on failed rows; see `CostlyError`.
        pending: Rows that wait for answers of batches.
        requests: Requests of these that have to be recorded, by digest.
    """

    tables: list[pa.Table] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)
    retries: int = 0
    rate_limited: int = 0
    fits: int | None = None
    mixed: bool = False
    wasted: Counter[str] = field(default_factory=Counter)
    pending: int = 0
    requests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Partial:
    """The result of a call for some rows of a batch, and the errors of the others.

    Attributes:
        table: The output, in the batch's order.
        errors: The errors, by row position in the batch.
        used: Amounts spent on the failed rows beside those of their errors; see `RowErrors`.
    """

    table: pa.Table
    errors: Mapping[int, BaseException]
    used: Mapping[str, int] = field(default_factory=dict)


Answer = Union[pa.Table, Partial, BaseException]
"""The rows of a call of the user's code, or the error that it raised."""


async def attempt(
    batch: pa.Table,
    policy: Policy,
    id: str,
    max_faults: int,
    call: Callable[[pa.Table, bool], Awaitable[Answer]],
    wait: Callable[[float, Sequence[BaseException]], Awaitable[None]],
    server_ended: Callable[[], Awaitable[bool]] | None = None,
) -> BatchOutcome:
    """Compute a batch.

    If a server ended, the errors are not those of the rows that it had. They are called again
    together, since a row is rarely the reason, and then one by one. `max_faults` rows may fail
    before the whole call does. `server_ended` waits until the servers that the code calls can be
    used, and returns whether one was not since the last call began; None if it calls none.
    """
    outcome = BatchOutcome()
    waiting = [(batch, 1, 0)]
    longest = 0.0
    while waiting:
        rows, attempts, crashes = waiting.pop(0)
        if seconds := seconds_before_alone(crashes, longest):
            await wait(seconds, ())
        began = time.monotonic()
        answer = await call(rows, after_server_ended(crashes) == "alone")
        longest = max(longest, time.monotonic() - began)
        if isinstance(answer, Partial):
            outcome.tables.append(answer.table)
            outcome.mixed = True
            errors, alone = answer.errors, True
            outcome.wasted.update(answer.used)
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
        for error in errors.values():
            if isinstance(error, StageError):
                raise BatchError(rows, id, error)
            if isinstance(error, Pending):
                outcome.pending += 1
                outcome.requests |= error.requests
        errors = {i: error for i, error in errors.items() if not isinstance(error, Pending)}
        # An error of a client that lost its connection may be any; an answer was paid for.
        blamed = {i: e for i, e in errors.items() if not isinstance(e, CostlyError)}
        if server_ended is not None and blamed and await server_ended():
            outcome.retries += len(blamed) if isinstance(answer, Partial) else 1
            again, crashed = _rows_at(rows, blamed), crashes + 1
            again_as = after_server_ended(crashed)
            if again_as == "together":
                waiting.insert(0, (again, attempts, crashed))
            elif again_as == "alone":
                single = [again.slice(i, 1) for i in range(again.num_rows)]
                waiting[:0] = [(row, attempts, crashed) for row in single]
            else:
                error = ConnectionError(
                    f"the server crashed or hung all {crashed} times it had this row, the last "
                    f"time without other rows of this worker: {next(iter(blamed.values()))}"
                )
                outcome.faults.append(RowFault(again, error, crashed, SERVER_DIED, True))
                check_limit(outcome, policy, id, max_faults)
            errors = {i: error for i, error in errors.items() if i not in blamed}
        passing = {i: error for i, error in errors.items() if policy.is_transient(error)}
        # A rate limit that lets other rows pass is the server's pace, so it does not count.
        answers = isinstance(answer, Partial) and len(answer.errors) < rows.num_rows
        limited = {i: e for i, e in passing.items() if answers and http_status(e) == 429}
        counted = {i: e for i, e in passing.items() if i not in limited}
        delays, again_in = [], []
        for group, tries, more in ((limited, 1, 0), (counted, attempts, 1)):
            if (delay := policy.delay(group, tries)) is not None:
                delays.append(delay)
                again_in.append((_rows_at(rows, group), tries + more, crashes))
                errors = {i: error for i, error in errors.items() if i not in group}
        if delays:
            repeated = [error for i, error in passing.items() if i not in errors]
            await wait(max(delays), repeated)
            repeated = repeated if isinstance(answer, Partial) else [answer]
            outcome.retries += len(repeated)
            outcome.rate_limited += sum(http_status(error) == 429 for error in repeated)
            waiting[:0] = again_in
        elif errors and not alone:
            error = errors[0]
            if halves := _halves(rows, error, policy, outcome):
                # A half is called once, and a row alone is retried as a batch is.
                waiting[:0] = [
                    (half, 1 if half.num_rows == 1 else attempts, crashes) for half in halves
                ]
                continue
            raise BatchError(rows, id, error)
        for place, error in errors.items():
            row = rows.slice(place, 1)
            transient = policy.is_transient(error) or is_out_of_memory(error)
            outcome.faults.append(RowFault(row, error, attempts, transient=transient))
            check_limit(outcome, policy, id, max_faults)
    return outcome


def check_limit(outcome: BatchOutcome, policy: Policy, id: str, max_faults: int) -> None:
    """Raise BatchError if the last row that failed is one too many."""
    faults, raises = outcome.faults, policy.on_error == "raise"
    if raises or len(faults) > max_faults:
        reason = "" if raises else _TOO_MANY.format(len(faults), max_faults)
        raised = BatchError(faults[-1].batch, id, faults[-1].error, reason)
        raised.faults, raised.wasted = faults, outcome.wasted
        raise raised


def _rows_at(rows: pa.Table, places: Collection[int]) -> pa.Table:
    return rows if len(places) == rows.num_rows else unsliced(rows).take([*places])


def _halves(
    rows: pa.Table, error: BaseException, policy: Policy, outcome: BatchOutcome
) -> list[pa.Table]:
    """Return the halves of a batch that failed as a whole; none if it is not split."""
    half = rows.num_rows // 2
    if is_out_of_memory(error):
        outcome.fits = min(half, outcome.fits or half)
    elif policy.on_error == "raise":
        return []
    return [rows.slice(0, half), rows.slice(half)]


class BatchError(Exception):
    """A batch that failed for good, with some of its ids.

    Attributes:
        cause: The error that was raised.
        reason: Why the last row that failed is one too many; empty if another row may fail.
        faults: The rows of the batch that failed alone.
        wasted: Amounts spent on failed rows.
        report: Their error records and the task's output rows, for the driver.
    """

    faults: Sequence[RowFault] = ()
    wasted: Mapping[str, int] = MappingProxyType({})
    report = WorkReport()

    def __init__(self, rows: pa.Table, id: str, cause: BaseException, reason: str = "") -> None:
        ids = names(rows.column(id).to_pylist())
        super().__init__(f"{reason}in a batch of {rows.num_rows} rows, ids {ids}")
        self.cause, self.reason = cause, reason
