"""Prompts over rows: rows become concurrent requests, and answers become rows."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from vane_dagster.errors import RowErrors, names
from vane_dagster.providers.base import (
    Answer,
    Message,
    Request,
)
from vane_dagster.providers.content import Content, ReadFile
from vane_dagster.providers.format import Format, InvalidAnswer
from vane_dagster.providers.prompt_function import PromptFunction
from vane_dagster.providers.template import Template
from vane_dagster.providers.usage import COUNTS, USAGE, checked_usage, counted, usage_column
from vane_dagster.types.callables import unwrapped

_UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""What Arrow raises for a value that its type does not hold."""
_NOTHING = "(no answer)"
"""Stands for an empty answer in a conversation."""
_ADVICE = {
    "adapter": 'an adapter is for provider="vllm" with engine_kwargs={"enable_lora": True}, on '
    "one node: not with Ray's executor. A server takes the name of one of its adapters as the "
    "model's name",
    "reasoning": 'reasoning is returned by "openai", by "anthropic", and by vLLM '
    "with a reasoning_parser in engine_kwargs or in the server's flags",
}
InTurns = Callable[..., Awaitable[list[Any]]]
"""Calls a coroutine function with each row of a batch; see `RequestsCall`."""


@dataclass(frozen=True)
class PromptTask:
    """The model task of a prompt stage.

    Attributes:
        template: The template of the messages.
        output: The column of answers; the column of `USAGE` is named after it.
        sampling: See `Request`. A function may return others for its row.
        format: The format of an answer.
        explain: How often to send a model the problem of its answer, and ask again.
        function: The user's function that makes the messages; None if the template does.
        columns: The columns that the function gets; None for all.
        id: The input's id column. Its value is that of requests, if the stage reads it.
        read_file: Reads the files that rows name; None to refuse such rows.
        batches: The answers of batches, which precede the provider's; None without batches.
        adapter: The folder of a LoRA adapter; folders by the values of `adapter_column`; or None.
        adapter_column: The column with each row's adapter; empty for one adapter or none.
        include_reasoning: Whether the output has a column of the model's reasoning.
    """

    template: Template
    output: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    format: Format = field(default_factory=Format)
    explain: int = 0
    function: PromptFunction | None = None
    columns: tuple[str, ...] | None = ()
    id: str = ""
    read_file: ReadFile | None = None
    batches: Any = None
    adapter: Any = None
    adapter_column: str = ""
    include_reasoning: bool = False

    method = "submit"

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The columns that it needs, and those of its function; None for all."""
        if self.columns is None:
            return None
        return tuple(dict.fromkeys((*self.columns, *self.needed)))

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns of its template and its adapters."""
        adapters = [self.adapter_column] if self.adapter_column else []
        return tuple(dict.fromkeys((*self.template.fields, *adapters)))

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature is 0, so that equal prompts may share an answer."""
        temperature = self.sampling.get("temperature")
        return type(temperature) in (int, float) and temperature == 0

    @property
    def usage(self) -> str:
        """The column of the answers' usage."""
        return f"{self.output}_usage"

    @property
    def schema(self) -> pa.Schema:
        """The answer, its reasoning if that is asked for, and its usage."""
        reasoning = {f"{self.output}_reasoning": pa.string()} if self.include_reasoning else {}
        return pa.schema({self.output: self.format.type, **reasoning, self.usage: USAGE})

    @property
    def contents(self) -> Sequence[Content]:
        """The parts of the messages that are not text."""
        return self.template.contents

    @property
    def features(self) -> Mapping[str, str]:
        """What it asks of the provider besides texts, each with the reason or how to get it."""
        needs = {need: f"the prompt has {part}" for part in self.contents for need in part.needs}
        asked = {"adapter": self.adapter is not None, "reasoning": self.include_reasoning}
        return needs | {name: _ADVICE[name] for name, is_asked in asked.items() if is_asked}

    @property
    def order(self) -> Template | None:
        """The texts that order rows: an engine has the prefix of neighbours in its cache.

        None if a function makes prompts, since only the model's workers have it, and if no text
        before the first image, sound or document differs.
        """
        leading = self.template.leading
        return leading if leading.fields else None

    def keyed(self, include: Any) -> Mapping[str, Any]:
        """Return the values that change the output, in a frozen order."""
        form = self.format
        return {
            **({"columns": self.columns} if self.function else {}),
            "messages": (self.template.keyed, self.template.system),
            "sampling_params": dict(sorted(self.sampling.items())),
            # A pydantic model counts by its code.
            "return_format": None if form.model else form.schema or form.choices,
            "output_column": self.output,
            "include_columns": include,
            "explain_errors": self.explain,
            "include_reasoning": self.include_reasoning,
            "adapter_column": self.adapter_column,
            "adapters" if self.adapter_column else "adapter": self.adapter,
        }

    @property
    def classes(self) -> tuple[type, ...]:
        """The pydantic model that validates answers."""
        return (self.format.model,) if self.format.model else ()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's function that makes the messages. It counts in keys."""
        return (self.function.call,) if self.function else ()

    @property
    def preloaded(self) -> tuple[Callable[..., Any], ...]:
        """The classes and functions that run only in a worker that was started with their modules.

        The others travel with each call, so a worker runs each edit of them.
        """
        classes = self.classes if self.format.is_preloaded else ()
        return (*classes, *(self.functions if self.function and self.function.is_preloaded else ()))

    def describe(self, model: str) -> str:
        """Describe the request to a model, for users."""
        if self.function is not None:
            call = unwrapped(self.function.call)
            return f"{model} is asked what `{getattr(call, '__name__', call)}` makes of a row"
        return f"{model} is asked: {' '.join(map(str, self.template.parts))}"

    async def run(self, provider: Any, in_turns: InTurns) -> dict[str, Any]:
        """Submit a request for each row, in its turn."""
        if self.batches is not None:
            provider = self.batches.answering(provider)
        errors: dict[int, BaseException] = {}
        used: Counter[str] = Counter()
        turn = getattr(provider, "turn", nullcontext)
        results = await in_turns(lambda row: self._one(provider, row, used), turn)
        good = {}
        for place, answer in enumerate(results):
            if isinstance(answer, BaseException):
                errors[place] = answer
                continue
            try:
                good[place] = self._made(*answer), answer[1]
            except Exception as error:
                errors[place] = error
        kept = sorted(good)
        answers = _columns(self, [good[place] for place in kept])
        if errors:
            raise RowErrors(dict(sorted(errors.items())), answers if kept else None, used=used)
        return answers

    def _asked(self, row: dict[str, Any], id: str) -> Request:
        """Return the request of a row."""
        own: Mapping[str, Any] = {}
        if self.function is None:
            messages = self.template.messages(row, self.read_file)
        else:
            prompt, own = self.function.prompt(row)
            messages = self.template.with_system(prompt, "the function of the prompt")
        form, adapter = self.format, self._adapter(row)
        sampling = {**self.sampling, **own}
        return Request(messages, sampling, form.schema, form.choices, id, adapter)

    def _adapter(self, row: Mapping[str, Any]) -> str:
        """Return the folder of a row's adapter; empty for none."""
        if not self.adapter_column:
            return self.adapter or ""
        if (name := row[self.adapter_column]) is None:
            return ""
        folder: str | None = self.adapter.get(str(name))
        if folder is None:
            raise ValueError(
                f"column {self.adapter_column!r} has the adapter {name!r}; expected null or one of "
                f"{names(self.adapter, 20)}"
            )
        return folder

    def _made(self, value: Any, answer: Answer) -> pa.Array:
        """Return a row's answer as an array."""
        try:
            return pa.array([value], self.format.type)
        except _UNFIT as error:  # such as an integer of more than 64 bits, or half a surrogate pair
            raise InvalidAnswer(f"The answer has no place in its column: {error}", answer) from None

    async def _one(
        self, provider: Any, row: dict[str, Any], used: Counter[str]
    ) -> tuple[Any, Answer] | BaseException:
        """Return the value and the answer of a row, or the error of its prompt."""
        id = str(row.get(self.id, ""))
        if self.batches is not None and self.batches.adds_id:
            del row[self.id]
        make = functools.partial(self._asked, row, id)
        try:
            request = await asyncio.to_thread(make) if self.contents else make()
        except BaseException as error:  # it may be of the user's function
            return error
        began = time.perf_counter()
        answer = checked_usage(await provider.submit(request))
        for left in range(self.explain, -1, -1):
            try:
                value = self.format.value(answer)
                break
            except InvalidAnswer as error:
                if not left:
                    raise
                messages = with_problem(request.messages, answer.text, error.problem)
            request = replace(request, messages=messages)
            try:
                answer = _summed(answer, checked_usage(await provider.submit(request)))
            except BaseException:  # also if the row's time is up
                used.update(counted(answer))
                raise
        return value, replace(answer, seconds=time.perf_counter() - began)


def with_problem(messages: Sequence[Message], text: str, problem: str) -> Sequence[Message]:
    """Return a conversation that goes on with an answer and its problem.

    Endpoints refuse messages without text, and chat templates two questions in a row.
    """
    answered = {"role": "assistant", "content": text if text.strip() else _NOTHING}
    again = f"{problem}. Answer again, with nothing else."
    return [*messages, answered, {"role": "user", "content": again}]


def _summed(former: Answer, answer: Answer) -> Answer:
    both = {name: getattr(former, name) + getattr(answer, name) for name in COUNTS}
    return replace(answer, **both)


def _columns(prompt: PromptTask, answers: Sequence[tuple[pa.Array, Answer]]) -> dict[str, Any]:
    none = pa.array([], prompt.format.type)
    columns = [
        pa.concat_arrays([none, *(made for made, _ in answers)]),
        *([pa.array([a.reasoning for _, a in answers], pa.string())] * prompt.include_reasoning),
        usage_column([answer for _, answer in answers]),
    ]
    return dict(zip(prompt.schema.names, columns))
