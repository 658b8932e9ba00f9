"""The thread in which a model is constructed and called."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vane_dagster.worker.model_thread import ModelThread


def test_a_worker_with_one_slot_uses_its_own_thread():
    assert ModelThread(slots=1).run(threading.get_ident) == threading.get_ident()


def test_calls_of_several_threads_run_in_one():
    thread = ModelThread(slots=2)
    with ThreadPoolExecutor(4) as callers:
        found = {callers.submit(thread.run, threading.get_ident) for _ in range(40)}
        (ident,) = {each.result(20) for each in found}
    assert ident != threading.get_ident()
    assert thread.run(thread.run, threading.get_ident) == ident, "a call within a call"


def test_an_error_is_raised_where_the_call_was_made():
    thread = ModelThread(slots=2)
    with pytest.raises(SystemExit, match="3"):
        thread.run(exit, 3)
    with pytest.raises(ValueError, match="invalid literal"):
        thread.run(int, "x")
    assert thread.run(int, "7") == 7


def test_a_result_is_not_kept():
    class Rows:
        alive = 0

        def __init__(self) -> None:
            Rows.alive += 1

        def __del__(self) -> None:
            Rows.alive -= 1

    thread = ModelThread(slots=2)
    thread.run(Rows)
    thread.run(int)
    assert Rows.alive == 0
