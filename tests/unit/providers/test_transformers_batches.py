"""Batches of prompts of the transformers provider, with a fake model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.transformers import TransformersProvider


class OutOfMemory(RuntimeError):
    pass


class Panic(BaseException):
    """Stands for the panic of an extension in Rust."""


def provider(generate: Callable[[list[str]], list[str]], size: int = 4) -> TransformersProvider:
    made = TransformersProvider.__new__(TransformersProvider)
    made._torch = SimpleNamespace(OutOfMemoryError=OutOfMemory)
    made._sees, made._batch_size, made._waiting, made._working = False, size, [], None

    def generated(batch: Sequence[Any]) -> list[Answer]:
        return list(map(Answer, generate([each.request.id for each in batch])))

    made._generate = generated  # type: ignore[method-assign]  # in place of the model
    return made


def ask(made: TransformersProvider, count: int, timeout: float = 10) -> list[Any]:
    async def one(n: int) -> str:
        messages = [{"role": "user", "content": "q"}]
        return (await asyncio.wait_for(made.submit(Request(messages, id=str(n))), timeout)).text

    async def every() -> list[Any]:
        return await asyncio.gather(*map(one, range(count)), return_exceptions=True)

    return asyncio.run(every())


def test_a_batch_that_does_not_fit_into_memory_is_halved():
    sizes: list[int] = []

    def generate(ids: list[str]) -> list[str]:
        sizes.append(len(ids))
        if len(ids) > 1:
            raise OutOfMemory
        return ids

    assert ask(provider(generate), 4) == ["0", "1", "2", "3"]
    assert sizes == [4, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("error", [Panic, OutOfMemory])
def test_an_error_of_a_batch_is_that_of_its_rows(error):
    def generate(ids: list[str]) -> list[str]:
        raise error

    assert [type(found) for found in ask(provider(generate, 1), 2)] == [error] * 2


def test_a_row_whose_time_is_up_is_not_computed():
    asked: list[str] = []

    def generate(ids: list[str]) -> list[str]:
        asked.extend(ids)
        import time

        time.sleep(0.2)
        return ids

    ask(provider(generate, 1), 3, timeout=0.1)
    assert asked == ["0"]
