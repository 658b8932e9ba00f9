"""A run that waits for batches, while the provider does not answer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from vane_dagster.errors import ComputeError
from vane_dagster.events import Noticed, Submitted, Waiting
from vane_dagster.orchestration import run as module


class Batches:
    """The batches of a stage, one of which is in flight until the provider answers."""

    def __init__(self, unanswered: int) -> None:
        self._waiting, self._left = {"a"}, unanswered

    def waiting(self) -> set[str]:
        return self._waiting

    def refresh(self) -> None:
        self._left -= 1
        if self._left >= 0:
            raise ComputeError("the provider does not answer")
        self._waiting = set()


def wait(monkeypatch, unanswered: int) -> list[object]:
    """Wait for the batches of a partition; each look is a minute after the one before."""
    clock, heard = itertools.count(0.0, 20.0), list[object]()
    time = SimpleNamespace(
        monotonic=lambda: next(clock), sleep=lambda _: None,
        strftime=lambda *_: "", localtime=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(module, "stage_batches", lambda *_: [Batches(unanswered)])
    run = SimpleNamespace(listen=heard.append, flush=lambda: None, check=lambda: None, store=None)
    module.await_batches(run, None, [Submitted("s", "a", 0.0)])
    return heard


def test_looks_that_fail_are_repeated(monkeypatch) -> None:
    assert [type(event) for event in wait(monkeypatch, 2)] == [Waiting, Noticed, Noticed]


def test_a_run_fails_if_the_provider_never_answers(monkeypatch) -> None:
    with pytest.raises(ComputeError, match="does not answer"):
        wait(monkeypatch, 10_000)
