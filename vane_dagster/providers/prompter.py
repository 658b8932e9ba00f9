"""The model of a prompt stage: rows become requests, all at once, and answers become rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from vane_dagster.errors import RowErrors
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.format import Format
from vane_dagster.providers.template import Template
from vane_dagster.providers.usage import USAGE


@dataclass(frozen=True)
class Prompt:
    """What a prompt stage asks of each row.

    Attributes:
        template: What its messages are made of.
        output: The column of answers; the one of `USAGE` is named after it.
        sampling: See `Request`.
        format: What an answer has to be.
        carried: Columns that are passed on.
        explain: How often a model is told what is wrong with its answer, and asked again.
    """

    template: Template
    output: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    format: Format = field(default_factory=Format)
    carried: tuple[str, ...] = ()
    explain: int = 0

    @property
    def usage(self) -> str:
        """The column of what answers took."""
        return f"{self.output}_usage"


class Prompter:
    """Holds a provider, which stays warm with its worker.

    Args:
        provider: Its class.
        model: The model's name.
        options: For the provider.
    """

    def __init__(self, provider: Any, model: str, options: Mapping[str, Any]) -> None:
        self._provider = provider(model, **options)

    async def check_health(self) -> None:
        """Asks the provider, where it can be asked."""
        probe = getattr(self._provider, "check_health", None)
        if probe is not None and asyncio.iscoroutine(answer := probe()):
            await answer

    async def __call__(
        self, batch: pa.Table, *, prompt: Prompt, workers: int = 1
    ) -> dict[str, Any]:
        """Answers a batch, whose first column is the id; there are so many workers at most."""
        if (shared_by := getattr(self._provider, "shared_by", None)) is not None:
            shared_by(workers)
        rows = batch.to_pylist()
        id = batch.column_names[0]
        order = _by_prefix(prompt, rows)
        asked = {
            place: asyncio.ensure_future(self._one(rows[place], id, prompt)) for place in order
        }
        found = await asyncio.gather(*asked.values(), return_exceptions=True)
        errors = {i: a for i, a in zip(asked, found) if isinstance(a, BaseException)}
        good = {i: a for i, a in zip(asked, found) if not isinstance(a, BaseException)}
        kept = sorted(good)
        answers = _columns(batch.take(pa.array(kept, pa.int64())), prompt, [good[i] for i in kept])
        if errors:
            raise RowErrors(dict(sorted(errors.items())), answers if kept else None)
        return answers

    async def _one(self, row: Mapping[str, Any], id: str, prompt: Prompt) -> tuple[Any, Answer]:
        messages = list(prompt.template.messages(row))
        request = Request(
            messages, prompt.sampling, prompt.format.schema, prompt.format.choices, str(row[id])
        )
        began = time.perf_counter()
        answer = await self._provider.submit(request)
        for _ in range(prompt.explain):
            wrong = prompt.format.problem(answer.text)
            if wrong is None:
                break
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": f"{wrong}. Answer again, with nothing else."},
            ]
            former, answer = (
                answer,
                await self._provider.submit(replace(request, messages=messages)),
            )
            answer = _summed(former, answer)
        value = prompt.format.value(answer)
        return value, replace(answer, seconds=time.perf_counter() - began)


def _summed(former: Answer, answer: Answer) -> Answer:
    return replace(
        answer,
        prompt_tokens=former.prompt_tokens + answer.prompt_tokens,
        completion_tokens=former.completion_tokens + answer.completion_tokens,
        cached_tokens=former.cached_tokens + answer.cached_tokens,
    )


def _by_prefix(prompt: Prompt, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the rows, those whose prompts begin alike side by side.

    An engine then finds the beginning in its cache, which holds what came last.
    """

    def key(place: int) -> tuple[str, int]:
        row = rows[place]
        texts = [str(row[name]) for name in prompt.template.fields]
        if prompt.template.column:
            return texts[0], place
        return prompt.template.text.format_map({**row}), place

    return sorted(range(len(rows)), key=key)


def _columns(
    batch: pa.Table, prompt: Prompt, answers: Sequence[tuple[Any, Answer]]
) -> dict[str, Any]:
    given = {name: batch.column(name) for name in (batch.column_names[0], *prompt.carried)}
    usage = [
        {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "cached_tokens": answer.cached_tokens,
            "finish_reason": answer.finish_reason,
            "seconds": answer.seconds,
        }
        for _, answer in answers
    ]
    values = pa.array([value for value, _ in answers], prompt.format.type)
    return {**given, prompt.output: values, prompt.usage: pa.array(usage, USAGE)}
