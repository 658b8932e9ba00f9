"""Attempts at batches: which rows are at fault, which errors are waited for; ended servers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.arguments import grouped
from support.data import same
from vane_dagster.errors import CostlyError
from vane_dagster.worker.callers import at_once
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.retry import (
    BatchError,
    BatchOutcome,
    Partial,
    Policy,
    attempt,
)
from vane_dagster.worker.udf_caller import UdfCaller


def test_wrong_arguments_are_refused_where_they_are_written():
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    wrong = [
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"max_error_rate": 2}, "expected a share from 0 to 1"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"retry_on": "ValueError"}, "expected a list of classes"),
        ({"timeout_s": 0}, "expected seconds above 0"),
        ({"retry_on": [3]}, "exception classes or their names"),
        ({"on_error": "null", "schema": {"error": "VARCHAR"}}, "adds a column 'error'"),
    ]
    for given_, message in wrong:
        with pytest.raises(vd.errors.DefinitionError, match=message):
            docs.map_batches("same", same, **grouped({"schema": {"y": "BIGINT"}, **given_}))


# The rules themselves


def driven(ids, policy, answer, most=10**6):
    """Runs `attempt` over a function of the ids; waits are counted and not waited."""
    waits, calls = [], []

    async def call(batch, alone):
        calls.append(batch["id"].to_pylist())
        try:
            return answer(batch)
        except Exception as error:
            return error

    async def wait(seconds, errors):
        waits.append(seconds)

    table = pa.table({"id": pa.array(ids, pa.int64())})
    return at_once(attempt(table, policy, "id", most, call, wait)), calls, waits


@settings(max_examples=60)
@given(st.integers(0, 60), st.sets(st.integers(0, 60)))
def test_every_row_passes_or_is_at_fault_in_few_calls(count, bad):
    def answer(batch):
        if bad & set(batch["id"].to_pylist()):
            raise ValueError("bad")
        return batch

    outcome, calls, _ = driven(list(range(count)), Policy("quarantine"), answer)
    passed = [i for table in outcome.tables for i in table["id"].to_pylist()]
    faults = [fault.batch["id"][0].as_py() for fault in outcome.faults]
    present = sorted(bad & set(range(count)))
    assert faults == present
    assert passed == [i for i in range(count) if i not in bad]
    assert len(calls) <= 1 + 2 * len(present) * max(1, count).bit_length()


def test_errors_that_may_pass_are_waited_for_and_given_up_at_last():
    def answer(batch):
        raise TimeoutError("slow")

    with pytest.raises(BatchError, match="in a batch of 2 rows, ids 0, 1"):
        driven([0, 1], Policy("raise", max_retries=2), answer)
    outcome, calls, waits = driven([0], Policy("quarantine", max_retries=2), answer)
    assert len(calls) == 3
    assert outcome.faults[0].attempts == 3
    assert outcome.retries == 2
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2


def test_halves_of_a_batch_that_was_retried_in_vain_are_not():
    def answer(batch):
        if 5 in batch["id"].to_pylist():
            raise ConnectionError("the response is malformed")
        return batch

    outcome, calls, waits = driven(range(16), Policy("quarantine", max_retries=3), answer)
    assert [fault.batch["id"].to_pylist() for fault in outcome.faults] == [[5]]
    assert [len(ids) for ids in calls if 5 in ids] == [16] * 4 + [8, 4, 2] + [1] * 4
    assert len(waits) == outcome.retries == 6
    assert sum(5 not in ids for ids in calls) == 4, "the other half each time, once"


class Refused(CostlyError):
    used = MappingProxyType({"calls": 3})


class Status(Exception):
    def __init__(self, code: int) -> None:
        self.status_code = code


def test_retries_are_counted_by_row_where_rows_are_reported_and_by_call_otherwise():
    errors = {0: Status(429), 1: Status(500), 2: Status(400)}
    answers = iter([Partial(pa.table({"id": [3]}), errors), Status(429)])
    given = [0, 1, 2, 3], Policy("quarantine", max_retries=2)
    outcome, calls, _ = driven(*given, lambda batch: next(answers, batch))
    assert calls == [[0, 1, 2, 3], [0], [0], [1]]
    assert (outcome.retries, outcome.rate_limited) == (3, 2)


def test_a_rate_limit_counts_if_no_row_of_the_call_was_answered():
    """An endpoint that answers two rows a second, and then none any more."""

    def answer(batch):
        made, left = batch.slice(0, 2 * (batch.num_rows > 4)), batch.num_rows
        return Partial(made, dict.fromkeys(range(made.num_rows, left), Status(429)))

    outcome, calls, waits = driven(range(20), Policy("quarantine", max_retries=2), answer)
    assert [len(ids) for ids in calls] == [20, 18, 16, 14, 12, 10, 8, 6, 4, 4, 4]
    assert [fault.batch["id"].to_pylist() for fault in outcome.faults] == [[16], [17], [18], [19]]
    assert max(waits[:-2]) <= 1 < waits[-1]


def test_other_errors_count_beside_rate_limits():
    """A row that never succeeds is called as often as without a rate limit."""

    def answer(batch):
        ids = batch["id"].to_pylist()
        made, errors = batch.slice(0, ids[0] > 0), {i: Status(429) for i in range(len(ids))}
        errors |= {ids.index(0): Status(500)} if 0 in ids else {}
        return Partial(made, {i: e for i, e in errors.items() if i or ids[0] == 0})

    outcome, calls, _ = driven(range(4, -1, -1), Policy("quarantine", max_retries=2), answer)
    assert [fault.batch["id"].to_pylist() for fault in outcome.faults] == [[0]]
    assert sum(0 in ids for ids in calls) == outcome.faults[0].attempts == 3


def test_a_rate_limit_whose_last_retry_gets_an_answer_is_retried():
    answers = iter([Status(429)] * 2 + [Partial(pa.table({"id": [0]}), {1: Status(429)})])
    outcome, calls, _ = driven(
        [0, 1], Policy("quarantine", max_retries=2), lambda b: next(answers, b)
    )
    assert (calls, outcome.faults) == ([[0, 1]] * 3 + [[1]], [])


def test_errors_that_cost_something_are_added_up():
    errors = {1: Refused("no"), 2: ValueError("no")}
    policy = Policy("quarantine")
    outcome, *_ = driven([1, 2, 3], policy, lambda b: Partial(b[:1], errors, {"calls": 2}))
    assert outcome.wasted == {"calls": 5}
    assert len(outcome.faults) == 2
    with pytest.raises(BatchError, match="in a batch of 1 rows, ids 2") as caught:
        driven([1, 2, 3], Policy("raise"), lambda b: Partial(b[:1], errors, {"calls": 2}))
    assert caught.value.wasted == {"calls": 5}


class Unhashable(ConnectionError):
    """As a dataclass is, which defines `__eq__` alone."""

    __hash__ = None  # type: ignore[assignment]  # as Python itself sets it


def test_a_transient_error_need_not_be_hashable():
    def answer(batch):
        raise Unhashable("reset")

    outcome, calls, _ = driven([0, 1], Policy("quarantine", max_retries=1), answer)
    assert [fault.name for fault in outcome.faults] == ["Unhashable", "Unhashable"]
    assert calls == [[0, 1], [0, 1], [0], [0], [1], [1]]


def test_the_row_that_is_one_too_many_names_the_limit():
    def answer(batch):
        raise ValueError("bad")

    with pytest.raises(
        BatchError, match=r"more rows failed than .*max_error_rate.* .3 here, at most 2; .*, ids 2"
    ):
        driven([0, 1, 2, 3], Policy("quarantine"), answer, most=2)
    with pytest.raises(BatchError, match=r"^in a batch of 4 rows"):
        driven([0, 1, 2, 3], Policy("raise"), answer, most=2)


QUARANTINE = Policy("quarantine", max_retries=3)


@dataclass
class Served:
    """A server that some rows end, and the calls that it got.

    Attributes:
        poison: The rows that end it, as often as each is called.
        by_row: Whether errors are reported for rows, as prompts do, or for the whole batch.
        crashes: Times that it ends in addition, whatever rows it has.
    """

    poison: Collection[int] = ()
    by_row: bool = True
    crashes: int = 0
    calls: list[tuple[list[int], bool]] = field(default_factory=list)
    down: bool = False

    def answer(self, batch: pa.Table, alone: bool) -> Any:
        ids = batch["id"].to_pylist()
        self.calls.append((ids, alone))
        self.down = bool(set(ids) & set(self.poison)) or self.crashes > 0
        self.crashes -= self.crashes > 0
        if not self.down:
            return batch
        error = ConnectionError("the server closed the connection")
        if not self.by_row:
            return error
        return Partial(batch.slice(0, 0), dict.fromkeys(range(len(ids)), error))

    def run(self, rows: int, policy: Policy = QUARANTINE, most: int = 10) -> BatchOutcome:
        table = pa.table({"id": pa.array(range(rows), pa.int64())})

        async def call(batch: pa.Table, alone: bool) -> Any:
            return self.answer(batch, alone)

        async def wait(seconds: float, errors: Any) -> None:
            pass

        async def server_ended() -> bool:
            return self.down

        return at_once(attempt(table, policy, "id", most, call, wait, server_ended))


def kept(outcome: BatchOutcome) -> list[int]:
    return sorted(id for table in outcome.tables for id in table["id"].to_pylist())


@pytest.mark.parametrize("by_row", [True, False])
def test_after_a_crash_the_rows_are_called_again_together(by_row):
    server = Served(crashes=1, by_row=by_row)
    outcome = server.run(8)
    assert kept(outcome) == list(range(8))
    assert [ids for ids, _ in server.calls] == [list(range(8))] * 2
    assert outcome.faults == []


@pytest.mark.parametrize("by_row", [True, False])
def test_a_row_that_ends_its_server_is_the_only_one_that_fails(by_row):
    server = Served(poison=[3], by_row=by_row)
    outcome = server.run(8)
    assert kept(outcome) == [0, 1, 2, 4, 5, 6, 7]
    (fault,) = outcome.faults
    assert (fault.batch["id"].to_pylist(), fault.name) == ([3], "ServerDied")
    assert "crashed or hung all 5 times it had this row" in str(fault.error)
    alone = [ids for ids, is_alone in server.calls if is_alone]
    assert sorted(map(tuple, alone)) == [(0,), (1,), (2,), (3,), (3,), (3,), (4,), (5,), (6,), (7,)]


def test_crashes_count_beside_retries():
    policy = Policy("quarantine", max_retries=0)
    assert kept(Served(crashes=1).run(4, policy)) == [0, 1, 2, 3]


def test_without_quarantine_a_row_that_ends_its_server_fails_the_partition():
    with pytest.raises(BatchError) as raised:
        Served(poison=[3]).run(8, Policy("raise"))
    assert "ids 3" in str(raised.value)


def test_a_transient_error_of_a_server_that_answers_is_an_ordinary_one():
    server = Served()
    server.answer = lambda batch, alone: (  # type: ignore[method-assign]  # always refuses one row
        server.calls.append((batch["id"].to_pylist(), alone)),
        ConnectionError("reset"),
    )[1]
    outcome = server.run(1, Policy("quarantine", max_retries=2))
    assert [fault.name for fault in outcome.faults] == ["ConnectionError"]
    assert len(server.calls) == 3


def test_a_row_that_is_alone_meets_no_other_call():
    caller = UdfCaller(ModelSpec("m", False, b""), print)
    running, most = [0], []

    async def call(alone: bool) -> None:
        async with caller.alone(4) if alone else caller.room(4):
            await work(alone)

    async def work(alone: bool) -> None:
        running[0] += 1
        await asyncio.sleep(0)
        most.append((alone, running[0]))
        running[0] -= 1

    async def together() -> None:
        await asyncio.gather(*(call(number % 3 == 0) for number in range(30)))

    asyncio.run(together())
    assert {count for alone, count in most if alone} == {1}
    assert max(count for alone, count in most if not alone) > 1
