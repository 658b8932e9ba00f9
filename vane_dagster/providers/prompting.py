"""Prompts over rows: rows become concurrent requests, and answers become rows."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from vane_dagster.errors import RowErrors
from vane_dagster.providers.base import Answer, Message, Request, SamplingRefused
from vane_dagster.providers.format import Format
from vane_dagster.providers.template import PrefixOrder, Template
from vane_dagster.providers.usage import COUNTS, USAGE

_COLUMN = re.compile(r"\{\w+\}")


@dataclass(frozen=True)
class PromptTask:
    """The model task of a prompt stage.

    Attributes:
        template: The template of the messages.
        output: The column of answers; the column of `USAGE` is named after it.
        sampling: See `Request`. A value ``"{column}"`` is read from the row.
        format: The format of an answer.
        explain: How often to send a model the problem of its answer, and ask again.
    """

    template: Template
    output: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    format: Format = field(default_factory=Format)
    explain: int = 0

    method = "submit"

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns of its template and its sampling parameters."""
        return tuple(dict.fromkeys((*self.template.fields, *self.own.values())))

    @functools.cached_property
    def own(self) -> Mapping[str, str]:
        """The sampling parameters that are read from each row, and their columns."""
        texts = {name: value for name, value in self.sampling.items() if isinstance(value, str)}
        return {name: text[1:-1] for name, text in texts.items() if _COLUMN.fullmatch(text)}

    @property
    def usage(self) -> str:
        """The column of the answers' usage."""
        return f"{self.output}_usage"

    @property
    def schema(self) -> pa.Schema:
        """The answer and its usage."""
        return pa.schema([pa.field(self.output, self.format.type), pa.field(self.usage, USAGE)])

    @property
    def order(self) -> PrefixOrder:
        """Groups prompts with a common prefix, which an engine then has in its cache."""
        return PrefixOrder(self.template)

    @property
    def sums(self) -> Mapping[str, Sequence[str]]:
        """The counts of the answers' usage."""
        return {self.usage: COUNTS}

    def keyed(self, include: Any) -> Mapping[str, Any]:
        """See `ModelTask`."""
        return {
            "messages": (self.template.text, self.template.system),
            "sampling_params": self.sampling,
            "return_format": (self.format.schema, self.format.choices, self.format.model),
            "output_column": self.output,
            "include_columns": include,
            "explain_errors": self.explain,
        }

    @property
    def classes(self) -> tuple[type, ...]:
        """The pydantic model that validates answers."""
        return (self.format.model,) if self.format.model else ()

    def describe(self, model: str) -> str:
        """See `ModelTask`."""
        asked = f"column `{self.template.text}`" if self.template.column else self.template.text
        return f"{model} is asked: {asked}"

    async def run(self, provider: Any, batch: pa.Table) -> dict[str, Any]:
        """Submit all rows of a batch concurrently. Its first column is the id.

        Args:
            provider: The provider.
            batch: The rows.

        Returns:
            The output columns.

        Raises:
            RowErrors: With one error for each failed row, and the output of the others.
        """
        errors: dict[int, BaseException] = {}
        requests: dict[int, Request] = {}
        for place, row in enumerate(batch.to_pylist()):
            try:
                requests[place] = self._request(row, str(row[batch.column_names[0]]))
            except ValueError as error:
                errors[place] = error
        asked = (self._one(provider, request) for request in requests.values())
        found = dict(zip(requests, await asyncio.gather(*asked, return_exceptions=True)))
        good = {}
        for place, answer in found.items():
            if isinstance(answer, BaseException):
                errors[place] = answer
            else:
                good[place] = answer
        kept = sorted(good)
        taken = batch.take(pa.array(kept, pa.int64()))
        answers = _columns(taken, self, [good[place] for place in kept])
        if errors:
            raise RowErrors(dict(sorted(errors.items())), answers if kept else None)
        return answers

    def _request(self, row: Mapping[str, Any], id: str) -> Request:
        own = {name: row[column] for name, column in self.own.items()}
        every = {name: value for name, value in self.sampling.items() if name not in own}
        given = {name: value for name, value in own.items() if value is not None}
        messages, form = self.template.messages(row), self.format
        return Request(messages, {**every, **given}, form.schema, form.choices, id)

    async def _one(self, provider: Any, request: Request) -> tuple[Any, Answer]:
        form, began = self.format, time.perf_counter()
        try:
            answer = await provider.submit(request)
        except SamplingRefused as error:
            if self.own:
                raise ValueError(str(error)) from error
            raise
        for _ in range(self.explain):
            wrong = form.problem(answer.text)
            if wrong is None:
                break
            again = f"{wrong}. Answer again, with nothing else."
            follow_up: list[Message] = [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": again},
            ]
            request = replace(request, messages=[*request.messages, *follow_up])
            former, answer = answer, await provider.submit(request)
            answer = _summed(former, answer)
        return form.value(answer), replace(answer, seconds=time.perf_counter() - began)


def _summed(former: Answer, answer: Answer) -> Answer:
    both = {name: getattr(former, name) + getattr(answer, name) for name in COUNTS}
    return replace(answer, **both)


def _columns(
    batch: pa.Table, prompt: PromptTask, answers: Sequence[tuple[Any, Answer]]
) -> dict[str, Any]:
    given = {batch.column_names[0]: batch.column(0)}
    usage = [{field.name: getattr(answer, field.name) for field in USAGE} for _, answer in answers]
    values = pa.array([value for value, _ in answers], prompt.format.type)
    return {**given, prompt.output: values, prompt.usage: pa.array(usage, USAGE)}
