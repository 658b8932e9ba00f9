"""Turns of the calls in a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vane_dagster.worker.turns import Turns


class Calls:
    """Calls on threads of their own, each of which ends when it is told."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._ends: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}
        self.running: list[str] = []

    def begin(self, name: str, alone: bool = False) -> None:
        def body() -> None:
            with self._turns.take(alone):
                self.running.append(name)
                self._ends[name].wait(10)
                self.running.remove(name)

        self._ends[name] = threading.Event()
        self._threads[name] = threading.Thread(target=body)
        self._threads[name].start()
        time.sleep(0.05)  # so that they come in this order

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            self._threads[name].join()


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert is_true()


def test_a_call_alone_waits_for_those_before_it_and_later_ones_wait_for_it():
    calls = Calls()
    calls.begin("a")
    calls.begin("b")
    assert calls.running == ["a", "b"], "side by side"
    calls.begin("alone", alone=True)
    calls.begin("c")
    calls.begin("d")
    calls.end("a")
    assert calls.running == ["b"]
    calls.end("b")
    until(lambda: calls.running == ["alone"])
    calls.end("alone")
    until(lambda: sorted(calls.running) == ["c", "d"])
    calls.end("c", "d")


def test_a_call_that_raises_ends_its_turn():
    turns = Turns()
    for alone in (False, True, False, True):
        try:
            with turns.take(alone):
                raise ValueError
        except ValueError:
            pass
    with turns.take(alone=True):
        pass
