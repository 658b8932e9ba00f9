"""The policy of retries: what is retried, how often, after what delay, and what it counts."""

from __future__ import annotations

import random
import urllib.error
from collections.abc import Sequence
from email.message import Message
from typing import Any

import httpx
import pytest
import requests

from vane_dagster.retries import (
    CALLS,
    MAX_CONSECUTIVE_FAILURES,
    STORAGE,
    TIMED_OUT,
    WORKER_DIED,
    Backoff,
    FailureStreaks,
    LostCalls,
    Policy,
    Restarts,
    RetriedRows,
    after_server_ended,
    is_transient,
    loss_after,
    seconds_before_alone,
    with_retries,
)

# Errors and delays


class Busy(Exception):
    """As clients of HTTP services raise it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status_code = status
        self.response = type("Response", (), {"headers": headers})()


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (Busy(429), True),
        (Busy(522), True),
        (Busy(401), False),
        (ConnectionRefusedError(), True),
        (urllib.error.URLError(ConnectionRefusedError()), True),
        (urllib.error.HTTPError("http://a", 404, "", Message(), None), False),
        (requests.exceptions.ChunkedEncodingError("half an answer"), True),
        (httpx.WriteError("reset"), True),
        (ValueError(), False),
    ],
)
def test_errors_are_told_apart(error, passing):
    assert is_transient(error) is passing
    assert is_transient(error, ("ValueError",)) is (passing or isinstance(error, ValueError))
    assert is_transient(error, (type(error).__name__,)), "whatever its status"


@pytest.mark.parametrize(
    ("backoff", "failures", "shortest", "longest"),
    [
        (CALLS, 1, 0.5, 1.0),
        (CALLS, 50, 30.0, 60.0),
        (CALLS, 10_000, 30.0, 60.0),
        (STORAGE, 1, 0.25, 0.5),
        (Backoff(1.0, 30.0), 5, 16.0, 16.0),
    ],
)
def test_delays_double_up_to_a_limit(backoff, failures, shortest, longest, monkeypatch):
    for share, expected in ((0.0, longest), (1.0, shortest)):
        monkeypatch.setattr(random, "uniform", lambda low, high, share=share: share * high)
        assert backoff.seconds(failures) == expected


def test_the_server_says_how_long_to_wait():
    assert CALLS.after(Busy(429, **{"retry-after": "7"}), 1) == 7
    assert CALLS.after(Busy(429, **{"retry-after": "86400"}), 1) == 60
    assert CALLS.after(Busy(429, **{"retry-after": "0"}), 1) >= 0.5, "it says nothing"
    assert CALLS.after(Busy(429, **{"retry-after": "1"}), 5) >= 8, "it has said so five times"
    assert CALLS.after(Busy(429, **{"retry-after": "Fri, 20 Nov 2026 10:00:00 GMT"}), 1) <= 1


@pytest.mark.parametrize(("fails", "calls", "passes"), [(0, 1, True), (3, 4, True), (4, 4, False)])
def test_storage_is_asked_four_times(fails, calls, passes):
    made: list[int] = []
    waits: list[float] = []

    def action() -> str:
        made.append(1)
        if len(made) <= fails:
            raise ConnectionError
        return "read"

    if passes:
        assert with_retries(action, waits.append) == "read"
    else:
        with pytest.raises(ConnectionError):
            with_retries(action, waits.append)
    assert (len(made), len(waits)) == (calls, calls - 1)
    made.clear()
    with pytest.raises(ValueError, match="wrong"):
        with_retries(lambda: (made.append(1), int("wrong")), waits.append)
    assert len(made) == 1, "no other error is retried"


# Calls


def test_a_call_waits_for_the_slowest_of_its_transient_errors_and_ends():
    policy = Policy(max_retries=2, retry_on=("ValueError",))
    assert policy.is_transient(ValueError())
    errors = {0: Busy(429, **{"retry-after": "7"}), 4: Busy(429, **{"retry-after": "9"})}
    assert [policy.delay(errors, attempts) for attempts in (1, 2, 3)] == [9, 9, None]
    assert policy.delay({}, 1) is None


def test_rows_of_a_server_that_ends_are_called_together_and_then_alone():
    ways = ["together"] * 2 + ["alone"] * 3 + ["reject"]
    assert [after_server_ended(crashes) for crashes in range(6)] == ways
    assert [seconds_before_alone(crashes, 1.0) for crashes in range(3)] == [0.0] * 3
    assert 0 <= seconds_before_alone(3, 1.0) <= 10
    assert 0 <= seconds_before_alone(4, 1e6) <= 120


# Lost calls


@pytest.mark.parametrize(
    ("cause", "seconds", "timeout_s", "loss"),
    [
        ("unclear", 6.0, 5.0, "timeout"),
        ("unclear", 4.0, 5.0, "crash"),
        ("unclear", 6.0, None, "crash"),
        ("timeout", 4.0, 5.0, "timeout"),
        ("crash", 6.0, 5.0, "crash"),
        ("table", 6.0, 5.0, "table"),
    ],
)
def test_an_unclear_loss_is_a_time_out_if_the_call_took_too_long(cause, seconds, timeout_s, loss):
    assert loss_after(cause, seconds, timeout_s) == loss


SLICE, ROW = range(10, 15), range(12, 13)
HALVES = [RetriedRows(10, 2), RetriedRows(12, 3)]
AGAIN = [RetriedRows(12, 1)]
WHOLE = [RetriedRows(10, 5)]
AS_IT_WAS = [RetriedRows(10, 5, may_kill=False)]


def rejected(error: Any) -> list[RetriedRows]:
    return [RetriedRows(12, 1, error, 2, "segmentation fault")]


@pytest.mark.parametrize(
    ("loss", "rows", "decisions"),
    [
        # Only what the rows may have caused counts against a row.
        ("crash", SLICE, [HALVES] * 9),
        ("crash", ROW, [AGAIN, rejected(WORKER_DIED)]),
        ("timeout", ROW, [AGAIN, rejected(TIMED_OUT)]),
        ("memory", SLICE, [HALVES] * 9),
        ("memory", ROW, [AGAIN, AGAIN, AGAIN, "give up"]),
        ("outside", SLICE, [AS_IT_WAS] * 99),
        ("outside", ROW, [[RetriedRows(12, 1, may_kill=False)]] * 99),
        ("shared", SLICE, [HALVES] * 99),
        ("shared", ROW, [AGAIN] * 99),
        ("table", SLICE, ["start over"] * 3 + ["give up"]),
        # Tasks without rows of their own.
        ("crash", None, ["start over"] * 3 + ["give up"]),
        ("memory", None, ["start over"] * 3 + ["give up"]),
        ("outside", None, ["start over"] * 99),
        ("shared", None, ["start over"] * 99),
    ],
)
def test_what_is_retried_of_a_lost_call(loss: Any, rows: Any, decisions: Sequence[Any]):
    lost = LostCalls()
    decided = [lost.decide(loss, "model", 0, rows, True, "segmentation fault") for _ in decisions]
    assert decided == decisions


@pytest.mark.parametrize("loss", ["crash", "timeout", "memory", "shared"])
def test_the_batch_in_progress_is_parted_from_the_other_rows(loss: Any):
    lost = LostCalls()
    for at, parts in [
        (range(2, 4), [(10, 2), (12, 2), (14, 1)]),
        (range(2), [(10, 2), (12, 3)]),
        (range(4, 5), [(10, 4), (14, 1)]),
        (range(5), [(10, 2), (12, 3)]),  # nothing is known
    ]:
        expected = [RetriedRows(start, rows) for start, rows in parts]
        assert lost.decide(loss, "model", 0, SLICE, True, at=at) == expected
    (again,) = lost.decide("crash", "model", 0, range(14, 15), True)
    assert bool(again.error) == (loss in ("crash", "timeout")), "the second death of this row"


@pytest.mark.parametrize(
    ("loss", "decisions"),
    [
        ("crash", [WHOLE] * 3 + ["give up"]),
        ("timeout", [WHOLE] * 3 + ["give up"]),
        ("memory", [WHOLE] * 3 + ["give up"]),
        ("outside", [AS_IT_WAS] * 99),
        ("shared", [WHOLE] * 99),
        ("table", ["start over"] * 3 + ["give up"]),
    ],
)
def test_slices_of_a_stage_that_isolates_no_rows_are_not_halved(loss: Any, decisions: Any):
    lost = LostCalls()
    assert [lost.decide(loss, "model", 0, SLICE, False) for _ in decisions] == decisions


def test_losses_of_a_row_a_fragment_and_a_stage_are_counted_for_themselves():
    lost = LostCalls()
    for fragment, stage in ((0, "model"), (1, "model"), (0, "other")):
        assert lost.decide("crash", stage, fragment, ROW, True) == AGAIN
    for fragment in (0, 1):
        assert lost.decide("table", "model", fragment, None, True) == "start over"
        assert lost.fragment_counts[fragment] == 1
    assert lost.decide("memory", "model", 0, ROW, True) == AGAIN
    assert lost.decide("crash", "model", 0, ROW, True) == [RetriedRows(12, 1, WORKER_DIED, 2)]


def test_rows_of_a_fragment_that_starts_over_may_be_at_other_places():
    lost = LostCalls()
    for fragment in (0, 1):
        lost.decide("crash", "model", fragment, ROW, True)
    lost.started_over(0)
    assert lost.decide("crash", "model", 0, ROW, True) == AGAIN
    assert lost.decide("crash", "model", 1, ROW, True) == [RetriedRows(12, 1, WORKER_DIED, 2)]


def test_a_stage_whose_workers_die_one_after_the_other_is_not_halved_for_ever():
    lost = LostCalls()
    for _ in range(16):
        assert lost.decide("crash", "model", 0, SLICE, True) == HALVES
    lost.decide("outside", "model", 0, SLICE, True)
    assert lost.decide("crash", "model", 0, SLICE, True) == "start over"
    assert lost.decide("shared", "model", 0, SLICE, True) == HALVES
    lost.answered("model")
    lost.decide("table", "model", 1, None, True)
    for loss in ["crash"] * 16 + ["shared"] * 99:
        assert lost.decide(loss, "model", 0, SLICE, True) == HALVES
    assert lost.decide("crash", "model", 0, SLICE, True) == "start over"


def test_a_stage_that_has_worked_may_have_as_many_bad_rows_in_a_row():
    lost = LostCalls()
    for _ in range(40):
        lost.answered("model")
    for number in range(20):
        row = range(number, number + 1)
        assert lost.decide("crash", "model", 0, row, True) == [RetriedRows(number, 1)]
        assert lost.decide("crash", "model", 0, row, True)[0].error == WORKER_DIED
    assert lost.decide("crash", "model", 0, SLICE, True) == "start over"


# Workers and servers


def test_a_worker_that_fails_at_several_fragments_in_a_row_is_replaced_once():
    streaks, last = FailureStreaks(), MAX_CONSECUTIVE_FAILURES - 1

    def failures(worker: str) -> list[bool]:
        return [streaks.record_failure(worker, "m", order) for order in range(last + 1)]

    assert failures("m-1") == [False] * last + [True]
    assert not any(failures("m-2")), "the fresh one failed too: the reason is elsewhere"
    streaks.record_success("m-2", "m")
    assert failures("m-2") == [False] * last + [True]
    assert not any(streaks.record_failure("m-3", "m", 1) for _ in range(9)), "at one fragment"


START = None


@pytest.mark.parametrize(
    ("restarts", "failures", "delays", "exhausted"),
    [
        (Restarts(), [START] * 3, [1.0, 2.0, None], "3 starts in a row failed"),
        (Restarts(max_failed_starts=9), [START] * 6, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0], ""),
        (
            Restarts(max_crashes=5), [1.0] * 5, [1.0, 2.0, 4.0, 8.0, None],
            "5 crashes without 10 minutes of uptime between them",
        ),
        (
            Restarts(max_crashes=4), [599.0, 599.0, 600.0] * 3,
            [1.0, 2.0, 1.0, 2.0, 4.0, 1.0, 2.0, 4.0, 1.0], "",
        ),
        (Restarts(), [1.0, START, START, 1.0, START], [1.0, 2.0, 4.0, 2.0, 4.0], ""),
    ],
)  # fmt: skip
def test_a_server_restarts_after_delays_until_it_is_given_up(
    restarts: Restarts, failures: Any, delays: Any, exhausted: str
):
    """A failure is the uptime of a server that crashed, or a start that failed."""
    decided = []
    for uptime in failures:
        if uptime is START:
            decided.append(restarts.after_failed_start())
        else:
            restarts.record_ready()
            decided.append(restarts.after_crash(uptime))
    assert (decided, restarts.exhausted) == (delays, exhausted)


@pytest.mark.parametrize(
    "name",
    [
        "http.client:RemoteDisconnected", "httpx:ConnectError", "httpx:PoolTimeout",
        "httpx:RemoteProtocolError", "requests:ReadTimeout", "aiohttp:ServerDisconnectedError",
        "aiohttp:ClientPayloadError", "openai:APITimeoutError",
        "botocore.exceptions:EndpointConnectionError", "urllib3.exceptions:MaxRetryError",
    ],
)  # fmt: skip
def test_errors_of_connections_are_transient_in_every_library(name):
    module, _, kind = name.partition(":")
    error = getattr(pytest.importorskip(module, reason="an optional library"), kind)
    assert is_transient(error.__new__(error))
