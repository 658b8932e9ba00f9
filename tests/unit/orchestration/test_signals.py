"""A run that is cancelled: what it has committed is handed over, and signals are deferred."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.orchestration import run
from vane_dagster.orchestration.run import RunContext, on_a_thread
from vane_dagster.orchestration.signals import signals_deferred
from vane_dagster.orchestration.steps import _priority


class Interrupted(BaseException):
    pass


def context(listen: Any, **given: Any) -> RunContext:
    return RunContext(None, "run", None, listen, **given)


def test_commits_of_a_cancelled_run_are_handed_over(monkeypatch):
    monkeypatch.setattr(run, "_TICK_SECONDS", 0.1)
    taken: list[Any] = []

    def work(emit: Any, cancelled: threading.Event) -> None:
        emit("first")
        assert cancelled.wait(60)
        emit("second")  # a commit that was under way
        emit("third")

    def tick() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        on_a_thread(work, context(taken.append, tick=tick))
    assert taken == ["first", "second", "third"]


def test_a_cancelled_run_that_does_not_stop_is_left_in_time(monkeypatch):
    monkeypatch.setattr(run, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(run, "_TICK_SECONDS", 0.1)
    ended = threading.Event()

    def tick() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        on_a_thread(lambda emit, cancelled: ended.wait(60), context(print, tick=tick))
    assert not ended.is_set()
    ended.set()


def test_no_event_is_lost_to_a_signal_that_comes_while_it_is_written():
    taken: list[Any] = []

    def work(emit: Any, cancelled: threading.Event) -> None:
        for number in range(3):
            emit(number)
        cancelled.wait(60)

    def listen(event: Any) -> None:
        if event == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # where Python would raise
        taken.append(event)

    with pytest.raises(KeyboardInterrupt):
        on_a_thread(work, context(listen))
    assert taken == [0, 1, 2]


def test_a_second_signal_is_not_deferred():
    reached: list[int] = []

    def interrupt_twice() -> None:
        with signals_deferred() as received:
            for number in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                reached.append(number)
            assert not received, "the second signal did not end the block"

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert reached == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_priority_of_a_run_is_its_tag():
    given: Any = [SimpleNamespace(tags={"dagster/priority": tag}) for tag in ("7", "-2", "high")]
    assert [_priority(each) for each in given] == [7, -2, 0]
