"""The workers of a pool and what waits for them: who gets a call, and who is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from support.group_leases import Leased
from vane_dagster.compute.api import IO_WORKERS, Worker
from vane_dagster.engine.worker_group import WorkerQueue
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.worker.reports import Fault

FIRST, SECOND = Worker("m-1", "m"), Worker("m-2", "m")


def queue(slots: int = 2) -> WorkerQueue:
    both = WorkerQueue(slots)
    both.mark_ready(FIRST)
    both.mark_ready(SECOND)
    return both


def test_the_least_loaded_worker_gets_the_next_call():
    both = queue()
    both.begin(FIRST, 10)
    assert both.pick_worker() == SECOND
    both.begin(SECOND, 20)
    assert both.pick_worker() == FIRST
    both.begin(FIRST, 1)
    both.begin(SECOND, 1)
    assert both.pick_worker() is None
    both.end(SECOND, 20)
    assert both.pick_worker() == SECOND


def test_a_call_that_tolerates_no_other_waits_for_an_idle_worker():
    both = queue()
    both.begin(FIRST, 10)
    both.begin(SECOND, 10)
    assert both.pick_worker(exclusive=True) is None
    both.end(FIRST, 10)
    both.begin(FIRST, 1, exclusive=True)
    assert both.pick_worker() == SECOND
    both.begin(SECOND, 5)
    assert both.pick_worker() is None


def leased(*workers: Worker, **options: Any) -> Leased:
    return Leased(*workers, pools={"model": PoolSpec("m", "Model", (1, 2), **options)})


def test_a_spent_worker_is_replaced_after_its_last_answer():
    group = leased(FIRST)
    group.answer(FIRST)
    queue = group.group.worker_queues["m"]
    queue.begin(FIRST, 10)
    queue.begin(FIRST, 20)
    group.group.finish_call(FIRST, 10, "has answered 2 calls")
    assert queue.pick_worker() is None
    assert group.lease.loading == [], "it has one more call"
    group.group.finish_call(FIRST, 20, "has answered 3 calls")
    assert [worker.name for worker in group.lease.loading] == ["m-1'"]
    assert group.notices == ["worker m-1 has answered 2 calls: a fresh one takes its place"]


def test_a_worker_on_a_draining_node_works_until_another_is_ready_and_ends_after_its_last_call():
    group = leased(FIRST)
    group.answer(FIRST)
    queue = group.group.worker_queues["m"]
    queue.begin(FIRST, 10)
    fresh = group.lease.move(FIRST)
    group.group.move_workers()
    assert group.lease.loading == [fresh]
    assert queue.pick_worker() == FIRST, "no other is ready"
    group.answer(fresh)
    queue.begin(fresh, 10)
    queue.begin(fresh, 10)
    assert queue.pick_worker() is None
    group.group.move_workers()
    assert group.lease.replaced == [], "it has a call"
    group.group.finish_call(FIRST, 10, "has answered 2 calls")
    group.group.move_workers()
    assert group.lease.replaced == [FIRST]
    assert group.lease.loading == [], "nothing starts twice"
    assert [*queue.calls_by_worker] == [fresh]
    notice = "worker m-1 is on a node that Ray drains: m-1' replaces it"
    assert group.notices == [notice, "worker m-1 has answered 2 calls: a fresh one takes its place"]


@pytest.mark.parametrize("is_loading", [True, False])
def test_a_worker_that_is_lost_with_its_draining_node_has_been_replaced(is_loading):
    group = leased(FIRST)
    if not is_loading:
        group.answer(FIRST)
    fresh = group.lease.move(FIRST)
    group.group.move_workers()
    if is_loading:
        group.answer(FIRST, lost="its node has died")
    else:
        group.group.replace_lost(FIRST, "its node has died", starting=False)
    assert group.lease.loading == [fresh]
    group.answer(fresh)
    group.group.move_workers()
    assert group.lease.replaced == [FIRST]
    assert group.group.worker_queues["m"].pick_worker() == fresh


def test_an_unused_gpu_is_noticed_once_for_each_pool_that_reserves_one():
    group = leased(FIRST, SECOND)
    group.group.notice_unused_gpu(FIRST, "torch has used no memory of it")
    assert group.notices == [], "it reserves none"
    group = leased(FIRST, SECOND, bundle={"GPU": 0.5})
    for worker in (FIRST, SECOND):
        group.group.notice_unused_gpu(worker, "torch has used no memory of it")
    assert group.notices == [
        "'model': Model reserves 0.5 GPU for a worker, and torch has used no memory of it"
    ]


def test_a_pool_whose_workers_die_as_they_start_is_given_up():
    group = leased(FIRST)
    for _ in range(4):
        (worker,) = group.lease.loading
        group.answer(worker, lost="exit code 1")
    assert group.lease.loading == []
    assert group.lease.evicted == ["m"]
    ((stages, error),) = group.given_up
    assert stages == ("model",)
    assert "died while its model was constructed, 4 times in a row" in error


def test_many_workers_that_die_with_their_node_are_no_pool_that_cannot_start():
    """Their replacements may have been placed on it too, before its loss was known."""
    workers = [Worker(f"m-{number}", "m") for number in range(8)]
    group = leased(*workers)
    for worker in workers:
        group.answer(worker, lost="its node has died")
    assert group.given_up == []
    assert len(group.lease.loading) == len(workers)


def test_a_model_that_cannot_be_constructed_is_given_up():
    io = Worker("io-1", IO_WORKERS)
    group = leased(FIRST, SECOND, io)
    group.answer(FIRST, fault=Fault("ModelLoadError", "no weights"))
    group.answer(io)
    assert [text for _, text in group.given_up] == ["no weights"]
    assert group.group.worker_queue("model", calls_model=False).pick_worker() == io
