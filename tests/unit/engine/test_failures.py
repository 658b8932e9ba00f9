"""Lost calls and failing workers: whom to blame, and what to try again."""

from __future__ import annotations

from typing import Any

import pytest

import vane_dagster as vd
from support.arguments import grouped
from vane_dagster.compute.api import Worker
from vane_dagster.engine.failures import (
    MAX_CONSECUTIVE_FAILURES,
    FailureStreak,
    Retry,
    WorkerLoss,
    WorkerLosses,
)
from vane_dagster.engine.fragment_state import FragmentState, make_task_states
from vane_dagster.storage.manifest import FragmentRecord
from vane_dagster.worker.protocol import Fault
from vane_dagster.worker.retry import TIMED_OUT, WORKER_DIED

FIRST, SECOND = Worker("m-1", "m"), Worker("m-2", "m")


def model(batch: Any) -> Any:
    return batch


def stage(**given: Any) -> vd.Stage:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    return docs.map_batches("model", model, schema={"x": "BIGINT"}, **grouped(given))


def run(order: int = 0) -> FragmentState:
    record = FragmentRecord("file:///a", 0, 100, str(order), 10)
    return FragmentState(order, 0, order, record, make_task_states([stage().spec]))


def test_a_lost_worker_was_at_its_oldest_calls():
    losses = WorkerLosses()
    losses.record_loss(FIRST, [7, 3, 5], at_once=2)
    at_work = [losses.was_executing(FIRST, ticket) for ticket in (3, 5, 7)]
    assert at_work == [True, True, False]
    losses.record_loss(FIRST, [7], at_once=2)  # as its next call is found to be lost
    assert not losses.was_executing(FIRST, 7)


def test_rows_that_only_waited_are_given_out_again_as_they_are():
    losses, fragment = WorkerLosses(), run()
    assert losses.plan_retries(fragment, stage().spec, 10, 40, False, False) == [Retry(10, 40)]
    assert fragment.losses == {}


def test_rows_at_which_a_worker_died_are_halved_down_to_one():
    losses, fragment, spec = WorkerLosses(), run(), stage().spec
    losses.record_death(fragment, spec, 10, 5)
    halves = losses.plan_retries(fragment, spec, 10, 5, True, False)
    assert halves == [Retry(10, 2), Retry(12, 3)]
    assert fragment.losses == {}, "no single row is to blame yet"


@pytest.mark.parametrize(("hung", "error"), [(False, WORKER_DIED), (True, TIMED_OUT)])
def test_a_row_that_ends_two_workers_is_given_up(hung, error):
    losses, fragment, spec = WorkerLosses(), run(), stage().spec
    losses.record_death(fragment, spec, 12, 1)
    for _ in range(3):  # asking does not count
        assert losses.plan_retries(fragment, spec, 12, 1, True, hung) == [Retry(12, 1)]
    losses.record_death(fragment, spec, 12, 1)
    given_up = losses.plan_retries(fragment, spec, 12, 1, True, hung, "out of memory")
    assert given_up == [Retry(12, 1, error, "out of memory")]


def test_a_stage_whose_workers_die_one_after_the_other_is_not_halved_for_ever():
    losses, fragment, spec = WorkerLosses(), run(), stage().spec
    for _ in range(16):
        losses.record_death(fragment, spec, 0, 50)
    assert not losses.is_crash_looping("model")
    losses.record_death(fragment, spec, 0, 50)
    assert losses.is_crash_looping("model")
    losses.answered("model")
    assert not losses.is_crash_looping("model")


def test_a_worker_that_fails_at_several_fragments_in_a_row_is_replaced_once():
    streaks = FailureStreak()
    for order in range(MAX_CONSECUTIVE_FAILURES):
        assert not streaks.should_replace(FIRST)
        streaks.record_failure(FIRST, run(order))
    assert streaks.should_replace(FIRST)
    assert streaks.should_replace(FIRST), "asking changes nothing"
    streaks.record_replacement(FIRST)

    for order in range(MAX_CONSECUTIVE_FAILURES):
        streaks.record_failure(SECOND, run(order))
    assert not streaks.should_replace(SECOND), "the fresh one failed too: the reason is elsewhere"
    streaks.record_success(SECOND)
    for order in range(MAX_CONSECUTIVE_FAILURES):
        streaks.record_failure(SECOND, run(order))
    assert streaks.should_replace(SECOND)


def test_failures_at_one_fragment_do_not_count_against_the_worker():
    streaks = FailureStreak()
    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        streaks.record_failure(FIRST, run(1))
    assert not streaks.should_replace(FIRST)


@pytest.mark.parametrize(
    ("loss", "seconds", "limit"),
    [
        (WorkerLoss("died", True), 6.0, 5),
        (WorkerLoss("died", True), 4.0, None),
        (WorkerLoss("died", True, timed_out=True), 4.0, 5),
        (WorkerLoss("died", True, timed_out=False), 6.0, None),
        (WorkerLoss("sick", True, Fault("UdfError", "dead")), 6.0, None),
    ],
)
def test_whether_a_call_was_too_slow(loss, seconds, limit):
    assert loss.exceeded(stage(timeout_s=5).spec, seconds) == limit
    assert loss.exceeded(stage().spec, seconds) is None
