"""A prompt over rows: they become requests, all at once, and answers become rows."""

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

    method = "submit"

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns of its template, and those that are passed on."""
        return tuple(dict.fromkeys((*self.template.fields, *self.carried)))

    @property
    def usage(self) -> str:
        """The column of what answers took."""
        return f"{self.output}_usage"

    @property
    def schema(self) -> pa.Schema:
        """The answer, and what it took."""
        return pa.schema([pa.field(self.output, self.format.type), pa.field(self.usage, USAGE)])

    @property
    def keyed(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        return {
            "messages": (self.template.text, self.template.system),
            "sampling_params": self.sampling,
            "return_format": (self.format.schema, self.format.choices, self.format.model),
            "output_column": self.output,
            "include_columns": self.carried,
            "explain_errors": self.explain,
        }

    def told(self, model: str) -> str:
        """See `Recipe`."""
        asked = f"column `{self.template.text}`" if self.template.column else self.template.text
        return f"{model} is asked: {asked}"

    async def run(self, provider: Any, batch: pa.Table) -> dict[str, Any]:
        """Asks about all rows at the same time; those that fail are told one by one."""
        rows, id = batch.to_pylist(), batch.column_names[0]
        order = _by_prefix(self, rows)
        asked = {i: asyncio.ensure_future(self._one(provider, rows[i], id)) for i in order}
        found = await asyncio.gather(*asked.values(), return_exceptions=True)
        errors = {i: a for i, a in zip(asked, found) if isinstance(a, BaseException)}
        good = {i: a for i, a in zip(asked, found) if not isinstance(a, BaseException)}
        kept = sorted(good)
        taken = batch.take(pa.array(kept, pa.int64()))
        answers = _columns(taken, self, [good[i] for i in kept])
        if errors:
            raise RowErrors(dict(sorted(errors.items())), answers if kept else None)
        return answers

    async def _one(self, provider: Any, row: Mapping[str, Any], id: str) -> tuple[Any, Answer]:
        messages, form = list(self.template.messages(row)), self.format
        request = Request(messages, self.sampling, form.schema, form.choices, str(row[id]))
        began = time.perf_counter()
        answer = await provider.submit(request)
        for _ in range(self.explain):
            wrong = form.problem(answer.text)
            if wrong is None:
                break
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": f"{wrong}. Answer again, with nothing else."},
            ]
            former, answer = answer, await provider.submit(replace(request, messages=messages))
            answer = _summed(former, answer)
        return form.value(answer), replace(answer, seconds=time.perf_counter() - began)


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
