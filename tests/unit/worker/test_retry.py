"""Attempts at batches: which rows are at fault, and which errors are waited for."""

from __future__ import annotations

from types import MappingProxyType

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.arguments import grouped
from support.bad_rows import double
from vane_dagster.errors import CostlyError
from vane_dagster.storage.quarantine import attach, detach
from vane_dagster.worker.retry import (
    BatchError,
    Call,
    Partial,
    Policy,
    Wait,
    attempt,
)


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
            docs.map_batches("double", double, **grouped({"schema": {"y": "BIGINT"}, **given_}))


# The rules themselves


def driven(ids, policy, answer, most=10**6):
    """Runs `attempt` over a function of the ids; waits are counted and not waited."""
    steps = attempt(pa.table({"id": pa.array(ids, pa.int64())}), policy, "id", most)
    waits, calls, reply = [], [], None
    try:
        while True:
            step = steps.send(reply)
            reply = None
            if isinstance(step, Wait):
                waits.append(step.seconds)
            else:
                assert isinstance(step, Call)
                calls.append(step.batch["id"].to_pylist())
                try:
                    reply = answer(step.batch)
                except Exception as error:
                    reply = error
    except StopIteration as stop:
        return stop.value, calls, waits


@settings(max_examples=200)
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


def test_faults_travel_with_the_rows():
    table = pa.table({"id": [1]})
    faults = pa.table({"id": [2], "error": ["E"]})
    carried = attach(table, faults)
    assert carried.slice(0, 1).equals(table)
    assert detach([table, carried, carried]).to_pylist() == faults.to_pylist() * 2
    assert detach([table, attach(table, None)]) is None


class Refused(CostlyError):
    used = MappingProxyType({"calls": 3})


def test_errors_that_cost_something_are_added_up():
    errors = {1: Refused("no"), 2: ValueError("no")}
    policy = Policy("quarantine")
    outcome, *_ = driven([1, 2, 3], policy, lambda b: Partial(b[:1], errors, {"calls": 2}))
    assert outcome.wasted == {"calls": 5}
    assert len(outcome.faults) == 2
    with pytest.raises(BatchError, match="in a batch of 1 rows, ids 2"):
        driven([1, 2, 3], Policy("raise"), lambda b: Partial(b[:1], errors))


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
        BatchError, match=r"more rows failed than .*max_error_rate.* .3 here, 2 may; .*, ids 2"
    ):
        driven([0, 1, 2, 3], Policy("quarantine"), answer, most=2)
    with pytest.raises(BatchError, match=r"^in a batch of 4 rows"):
        driven([0, 1, 2, 3], Policy("raise"), answer, most=2)
