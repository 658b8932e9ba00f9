"""The policy of retries: what is retried, how often, after what delay, and what a failure counts.

It keeps counts and does nothing else: whoever asks does the waiting, or passes `sleep`.

| failure | retried | delay | counts against |
|---|---|---|---|
| a transient error of a call* | `max_retries` times in a row | 1 to 60 s, or as asked | the row |
| another error of a call, or out of device memory | in halves, down to one row | | the row |
| a server ended during a call | 2 times together, 3 times alone | random, before alone | the row |
| a worker was lost with calls that were not alone in it | in parts, each alone | | nothing |
| a worker crashed or hung with a call alone | in parts; a row alone a second time | | the row |
| the kernel or Ray killed it to free memory | in parts, down to one row | | the fragment |
| a table between tasks was lost | the fragment starts over | | the fragment |
| outside of the rows: a lost node, a call that had not begun | always, as it was | | nothing |
| a worker's calls returned no row at 3 fragments in a row | a fresh worker, once | | the worker |
| a worker did not start | 3 more times | | the pool |
| a server crashed or did not start | 12 crashes, 3 starts in a row | 1 to 30 s | the server |
| a transient error of storage | 3 more times | 0.5 to 2 s | the operation |
| a conflict with another writer of a table | 59 more times | up to 1.6 s | the transaction |

*HTTP 429 does not count while other rows of the call are answered.

A batch whose last retry has failed too is halved: each half is called once, and a row alone has
retries again. The parts of a lost call are its batch in progress, the rows before and those after;
where that batch is unknown, halves. A single batch is repeated row by row, or in 64 parts. A
fragment with more than three counts fails. Rows whose errors are not isolated are not divided, and
count for their fragment. A worker has calls of several runs and stages, so its loss says nothing of
one that was not alone. In a run that retries failed rows, calls that return no row do not count
against their worker.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal, TypeVar, Union

_T = TypeVar("_T")

OnError = Literal["raise", "quarantine", "null"]
MAX_FAILED_STARTS = 4
"""Failed starts in a row, of a worker and those that it replaces, after which a pool has failed."""
STORAGE_ATTEMPTS = 4
TRANSACTION_ATTEMPTS = 60
_MAX_FRAGMENT_COUNTS = 3
_MAX_DEATHS_PER_ROW = 2
_MAX_CONSECUTIVE_DEATHS = 16
"""Of a stage without as many answers: one that has worked may have as many bad rows in a row."""
MAX_CONSECUTIVE_FAILURES = 3
_SERVER_TOGETHER = 2
_SERVER_ALONE = 3

TRANSIENT = frozenset(
    {
        "ConnectionError",
        "TimeoutError",
        "IncompleteRead",
        "APIConnectionError",
        "NetworkError",
        "TimeoutException",
        "Timeout",
        "ClientConnectionError",
        "ProtocolError",
        "HTTPClientError",
        "ResponseParserError",
        "ClientPayloadError",
        "ServiceRequestError",
        "ServiceResponseError",
        "ChunkedEncodingError",
        "URLError",
        "MaxRetryError",
    }
)
"""Names of transient error classes of any library: the error's own class or one of its bases."""
TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, *range(520, 525), 529})
"""Those above 511 are not standard: of proxies, and some servers have 529 for an overload."""


def is_transient(error: BaseException, names: tuple[str, ...] = ()) -> bool:
    """Return whether an error is transient: of a connection, a time-out, or a busy server.

    So is one of the classes that the user names, whatever its status.
    """
    if class_names(error) & set(names):
        return True
    status = http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUS
    return bool(class_names(error) & TRANSIENT)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, from the attributes that libraries use for it."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if type(value) is int and 100 <= value < 600:
                return value
    if isinstance(response, Mapping):  # from botocore
        value = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        return value if type(value) is int else None
    return None


@dataclass(frozen=True)
class Backoff:
    """Delays in seconds that double from `first` to `most`, less a random share up to `jitter`."""

    first: float
    most: float
    jitter: float = 0.0

    def seconds(self, failures: int) -> float:
        """The delay after a number of failures."""
        longest = min(self.most, self.first * 2.0 ** min(failures - 1, 100))  # no overflow
        return longest * (1.0 - random.uniform(0.0, self.jitter))

    def after(self, error: BaseException, failures: int) -> float:
        """`seconds`, or the delay that the server asks for with an error if that is longer."""
        headers: Any = getattr(getattr(error, "response", error), "headers", None) or {}
        try:
            asked = float(headers.get("retry-after") or headers.get("Retry-After"))
        except (AttributeError, TypeError, ValueError):  # a date, or nothing
            asked = 0.0
        return max(self.seconds(failures), min(self.most, asked))


CALLS = Backoff(1.0, 60.0, 0.5)
STORAGE = Backoff(0.5, 60.0, 0.5)
_TRANSACTIONS = Backoff(0.05, 1.6, 1.0)


def class_names(error: BaseException) -> set[str]:
    """Return the names of an error's class and its bases."""
    kinds = type(error).__mro__
    return {kind.__name__ for kind in kinds} | {kind.__qualname__ for kind in kinds}


def is_transient_storage_error(error: BaseException) -> bool:
    """Return whether an error of a file system, or one of its causes, is transient."""
    return any(is_transient(cause) for cause in _causes(error))


def has_status(error: BaseException, status: int) -> bool:
    """Return whether an error of a file system, or one of its causes, has an HTTP status."""
    return any(http_status(cause) == status for cause in _causes(error))


def with_retries(action: Callable[[], _T], sleep: Callable[[float], None] = time.sleep) -> _T:
    """Run an operation on storage, and retry it after transient errors.

    Some drivers also retry on their own, but not after every transient error.
    """
    for attempt in range(1, STORAGE_ATTEMPTS):
        try:
            return action()
        except Exception as error:  # drivers raise their own exception classes
            if not is_transient_storage_error(error):
                raise
            sleep(STORAGE.after(error, attempt))
    return action()


def transactions(sleep: Callable[[float], None] = time.sleep) -> Iterator[int]:
    """Number the attempts at a transaction, with a delay after each that met another writer."""
    for attempt in range(1, TRANSACTION_ATTEMPTS + 1):
        yield attempt
        sleep(_TRANSACTIONS.seconds(attempt))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


RowLoss = Literal["WorkerDied", "TimeoutError"]
WORKER_DIED: Final = "WorkerDied"
"""The error of a row that kills the process that computes it."""
TIMED_OUT: Final = "TimeoutError"
"""The error of a row that takes too long."""
SERVER_DIED: Final = "ServerDied"
"""The error of a row that ends or hangs the server that computes it."""


@dataclass(frozen=True)
class Policy:
    """How a stage handles errors of its code.

    Attributes:
        on_error: The outcome of a row that fails.
        max_retries: Retries of a call after transient errors.
        retry_on: Names of further error classes that are transient.
        timeout_s: Seconds that a call may take; None for no limit.
    """

    on_error: OnError = "raise"
    max_retries: int = 3
    retry_on: tuple[str, ...] = ()
    timeout_s: float | None = None

    def is_transient(self, error: BaseException) -> bool:
        """Whether a call may succeed if it is repeated."""
        return is_transient(error, self.retry_on)

    def delay(self, errors: Mapping[int, BaseException], attempts: int) -> float | None:
        """The seconds after which rows with transient errors are called again; None if never."""
        if not errors or attempts > self.max_retries:
            return None
        different = {id(error): error for error in errors.values()}  # users' may not be hashable
        return max(CALLS.after(error, attempts) for error in different.values())


def after_server_ended(crashes: int) -> Literal["together", "alone", "reject"]:
    """How rows are called again whose server has ended so many times while it had them.

    A row is rarely the reason, and other rows of the worker or of other workers may be.
    """
    if crashes < _SERVER_TOGETHER:
        return "together"
    return "alone" if crashes < _SERVER_TOGETHER + _SERVER_ALONE else "reject"


def seconds_before_alone(crashes: int, longest_call: float) -> float:
    """The seconds before a row is called alone, random to part it from rows of other workers.

    They have rows at the same server, and all call theirs again when it is back.
    """
    most = 10.0 * (crashes - _SERVER_TOGETHER) * max(0.5, longest_call)
    return random.uniform(0.0, min(120.0, max(0.0, most)))


Loss = Literal["table", "outside", "shared", "memory", "crash", "timeout"]
"""What ended a call without an answer.

"outside": not the rows, but for example a lost node. "shared": they, or another call of the worker.
"""
Cause = Union[Loss, Literal["unclear"]]
"""What a backend knows of it: it may not see whether a worker crashed, or exceeded a time limit."""


def loss_after(cause: Cause, seconds: float, timeout_s: float | None) -> Loss:
    """Decide whether an unclear loss was a crash or a time-out."""
    if cause != "unclear" and cause != "timeout":
        return cause
    is_timeout = timeout_s is not None and (cause == "timeout" or seconds >= timeout_s)
    return "timeout" if is_timeout else "crash"


@dataclass(frozen=True)
class RetriedRows:
    """Rows of a fragment to compute again, or a row to reject.

    Attributes:
        start: The first row.
        rows: Number of rows.
        error: Error of a rejected row; None to compute them.
        deaths: Workers that a rejected row has ended.
        why: The last message of its worker, if any.
        may_kill: Whether they may have ended their worker, so that they are computed alone at one.
    """

    start: int
    rows: int
    error: RowLoss | None = None
    deaths: int = 0
    why: str = ""
    may_kill: bool = True


class LostCalls:
    """The calls of a wave that were lost, and what is retried of them."""

    def __init__(self) -> None:
        self._row_deaths = Counter[tuple[Hashable, str, int]]()
        self._consecutive_deaths = Counter[str]()
        self._answers = Counter[str]()
        self.fragment_counts = Counter[Hashable]()

    def answered(self, stage: str) -> None:
        """Record that a call of a stage was answered."""
        self._consecutive_deaths[stage] = 0
        self._answers[stage] += 1

    def started_over(self, fragment: Hashable) -> None:
        """Forget which rows of a fragment ended workers: their positions may be others' now."""
        deaths = self._row_deaths.items()
        self._row_deaths = Counter({key: n for key, n in deaths if key[0] != fragment})

    def decide(
        self,
        loss: Loss,
        stage: str,
        fragment: Hashable,
        rows: range | None,
        isolates: bool,
        why: str = "",
        at: range | None = None,
    ) -> list[RetriedRows] | Literal["start over", "give up"]:
        """Count a loss, and decide what is retried.

        `rows` are the rows of a slice, and None for any other task; `at` those of its batch in
        progress, if that is known. `isolates` says whether the stage quarantines single rows.
        """
        again = rows and RetriedRows(rows.start, len(rows), may_kill=loss != "outside")
        is_counted = loss not in ("outside", "shared")
        self._consecutive_deaths[stage] += is_counted and loss != "table"
        limit = max(_MAX_CONSECUTIVE_DEATHS, self._answers[stage])
        many = self._consecutive_deaths[stage] > limit
        if loss == "table" or (is_counted and many):
            again = None
        if again and again.rows > 1 and isolates and loss != "outside":
            if at is not None and len(at) == again.rows:
                at = None
            cuts = (again.rows // 2,) if at is None else (at.start, at.stop)
            if at is not None and len(at) == 1 and is_counted and loss != "memory":
                self._row_deaths[fragment, stage, again.start + at.start] += 1
            places = sorted({0, *cuts, again.rows})
            return [RetriedRows(again.start + a, b - a) for a, b in pairwise(places)]
        if not is_counted:
            return [again] if again else "start over"
        if again and isolates and loss != "memory":
            self._row_deaths[fragment, stage, again.start] += 1
            if (deaths := self._row_deaths[fragment, stage, again.start]) < _MAX_DEATHS_PER_ROW:
                return [again]
            error: RowLoss = TIMED_OUT if loss == "timeout" else WORKER_DIED
            return [replace(again, error=error, deaths=deaths, why=why)]
        self.fragment_counts[fragment] += 1
        if self.fragment_counts[fragment] > _MAX_FRAGMENT_COUNTS:
            return "give up"
        return [again] if again else "start over"


class FailureStreaks:
    """Consecutive failures of a worker at different fragments: a live worker may have a dead model.

    A fresh worker then replaces it. If the fresh one fails in the same way from its first call on,
    the cause is in the code or the rows, and none is replaced until a call succeeds.
    """

    def __init__(self) -> None:
        self._failed: dict[Hashable, set[Hashable]] = {}
        self._replaced_in_vain: set[str] = set()

    def record_success(self, worker: Hashable, pool: str) -> None:
        """Record that a call of a worker returned rows."""
        self._failed.pop(worker, None)
        self._replaced_in_vain.discard(pool)

    def record_failure(self, worker: Hashable, pool: str, fragment: Hashable) -> bool:
        """Record that a call returned no rows; return whether a fresh worker replaces this one."""
        failed = self._failed.setdefault(worker, set())
        failed.add(fragment)
        is_faulty = len(failed) >= MAX_CONSECUTIVE_FAILURES and pool not in self._replaced_in_vain
        if is_faulty:
            self._replaced_in_vain.add(pool)
        return is_faulty


@dataclass
class Restarts:
    """The failures of one server: after each, the seconds before the next start; None to give up.

    Attributes:
        backoff: The delays, over crashes and failed starts.
        max_failed_starts: Failed starts in a row after which the server has failed.
        max_crashes: Crashes of a server that was ready after which it has failed.
        stable_s: Uptime in seconds after which earlier crashes no longer count.
    """

    backoff: Backoff = Backoff(1.0, 30.0)
    max_failed_starts: int = 3
    max_crashes: int = 12
    stable_s: float = 600.0
    _failed_starts: int = field(default=0, init=False)
    _crashes: int = field(default=0, init=False)

    def record_ready(self) -> None:
        """Record that a start has succeeded."""
        self._failed_starts = 0

    def after_failed_start(self) -> float | None:
        """Count a failed start."""
        self._failed_starts += 1
        return self._delay()

    def after_crash(self, uptime: float) -> float | None:
        """Count a crash of a server that was ready."""
        self._crashes = 1 if uptime >= self.stable_s else self._crashes + 1
        return self._delay()

    @property
    def exhausted(self) -> str:
        """The limit that was reached, for people; empty if none was."""
        if self._failed_starts >= self.max_failed_starts:
            return f"{self._failed_starts} starts in a row failed"
        if self._crashes >= self.max_crashes:
            minutes = self.stable_s / 60
            return f"{self._crashes} crashes without {minutes:g} minutes of uptime between them"
        return ""

    def _delay(self) -> float | None:
        failures = self._crashes + self._failed_starts
        return None if self.exhausted else self.backoff.seconds(failures)
