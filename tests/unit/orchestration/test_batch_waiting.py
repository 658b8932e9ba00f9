"""A run that waits for batches, while the provider does not answer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vane_dagster.errors import ComputeError
from vane_dagster.events import Noticed, Submitted
from vane_dagster.orchestration import run as module
from vane_dagster.storage.batch_records import ProviderBatch


class Batches:
    """The batches of a stage, which are in flight until the provider answers."""

    def __init__(self, unanswered: int, canceled: str = "") -> None:
        self._waiting, self._left, self._canceled = {"a", "b"}, unanswered, canceled
        self.batches = self.read()

    def read(self) -> list[ProviderBatch]:
        return [ProviderBatch("m", 0.0, "run", 1, (key,), ("s",), name=key) for key in "ab"]

    def waiting(self) -> set[str]:
        return self._waiting

    def refresh(self) -> None:
        self._left -= 1
        if self._left >= 0:
            raise ComputeError("the provider does not answer")
        self._waiting = set()
        self.batches = [
            replace(batch, ended_at=1.0, is_canceled=batch.name == self._canceled)
            for batch in self.batches
        ]


def wait(monkeypatch, *given: Any) -> tuple[list[Noticed], set[str | None]]:
    """Wait for the batches of two partitions; each look is a minute after the one before."""
    clock, heard = itertools.count(0.0, 20.0), list[Noticed]()
    time = SimpleNamespace(
        monotonic=lambda: next(clock), sleep=lambda _: None,
        strftime=lambda *_: "", localtime=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(module, "stage_batches", lambda *_: [Batches(*given)])
    run = SimpleNamespace(listen=heard.append, tick=lambda: None, store=None)
    submitted: Any = [Submitted("s", key, 0.0) for key in "ab"]
    canceled = module.await_batches(cast("Any", run), cast("Any", None), submitted)
    return heard, canceled


def test_looks_that_fail_are_repeated(monkeypatch) -> None:
    heard, _ = wait(monkeypatch, 2)
    assert [event.is_problem for event in heard] == [False, True, True]


def test_what_a_user_has_cancelled_is_left_to_the_user(monkeypatch) -> None:
    assert wait(monkeypatch, 1, "b")[1] == {"b"}


def test_a_run_fails_if_the_provider_never_answers(monkeypatch) -> None:
    with pytest.raises(ComputeError, match="does not answer"):
        wait(monkeypatch, 10_000)
