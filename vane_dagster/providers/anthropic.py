"""Any endpoint with Anthropic's Messages API."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.errors import names
from vane_dagster.providers.base import Answer, Message, Request, SamplingRefused
from vane_dagster.providers.http import HttpProvider, choice_schema, chosen, in_object
from vane_dagster.providers.usage import finish_reason, token_count
from vane_dagster.servers.handle import ServerHandle

_MAX_TOKENS = 4096
"""The API requires a limit; this is the one of stages without a limit of their own."""
_UNKNOWN = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "n",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
    }
)
"""OpenAI's parameters without a counterpart."""
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
"""Finish reasons under the names of `Answer`; others, such as "refusal", keep theirs."""
_TOOL = "answer"
_COUNTS = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
)


class AnthropicProvider(HttpProvider):
    """Connects to an endpoint with the `anthropic` client, over one connection pool.

    System messages become the request's ``system``. Of the sampling parameters, ``stop`` becomes
    ``stop_sequences``, ``max_completion_tokens`` becomes ``max_tokens`` (4096 if the stage sets
    none), and those that the API lacks, such as ``seed``, are refused. All others are added to the
    body unchanged.

    With a `return_format` the model must call a tool whose input has that schema, and the input is
    the answer; with extended thinking, where the API has no such obligation, it may.

    Args:
        model: The model's name at the endpoint.
        base_url: The endpoint. Default: ``$ANTHROPIC_BASE_URL``, else Anthropic's own.
        api_key_env: See `HttpProvider`.
        timeout: See `HttpProvider`.
        max_connections: See `HttpProvider`.
        requests_per_minute: See `HttpProvider`.
        tokens_per_minute: See `HttpProvider`.
        extra_body: See `HttpProvider`. `sampling_params` may have an ``extra_body`` too, whose
            fields take precedence.
    """

    LIBRARY = "anthropic"
    CLIENT = "AsyncAnthropic"
    SERVER_PATH = ""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "ANTHROPIC_API_KEY",
        timeout: float = 600.0,
        max_connections: int = 64,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
        server: ServerHandle | None = None,
    ) -> None:
        super().__init__(
            model,
            base_url=base_url,
            api_key_env=api_key_env,
            timeout=timeout,
            max_connections=max_connections,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            extra_body=extra_body,
            server=server,
        )

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        system, messages = _split(request.messages)
        known, extra = self._split_parameters(_parameters(request.sampling), ("max_tokens",))
        schema = choice_schema(request.choices) if request.choices else request.schema
        wrapped = schema is not None and schema.get("type") != "object"
        body: dict[str, Any] = {"system": system} if system else {}
        if schema is not None:
            body |= _tool(in_object(schema) if wrapped else schema, extra)
        body |= extra
        async with self._in_turn() as client:
            began = time.perf_counter()
            found = await client.messages.create(
                model=self._model,
                messages=messages,
                max_tokens=known.get("max_tokens", _MAX_TOKENS),
                extra_body=body or None,
            )
        content = getattr(found, "content", None)
        if not (isinstance(content, list) and all(map(_is_block, content))):
            raise self._malformed(found)
        usage = getattr(found, "usage", None)
        prompt, written, cached, answered = (
            token_count(getattr(usage, name, None)) for name in _COUNTS
        )
        if tokens := prompt + written + cached + answered:
            self._tokens.learn(tokens)
        text = _text(content, wrapped)
        reason = finish_reason(getattr(found, "stop_reason", None))
        details = getattr(found, "stop_details", None)
        answer = Answer(
            chosen(text) if request.choices and text else text,
            prompt + written + cached,
            answered,
            cached,
            _REASONS.get(reason, reason),
            time.perf_counter() - began,
        )
        return self._with_text(answer, False, getattr(details, "explanation", None))

    @classmethod
    def check_options(cls, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """See `HttpProvider.check_options`."""
        if problem := _unknown(sampling):
            raise ValueError(problem)
        super().check_options(options, sampling)


def _split(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """Separate the system messages, which are no part of the API's conversation."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if wrong := {message["role"] for message in others} - {"user", "assistant"}:
        raise ValueError(
            f"a message has the role {names(sorted(wrong))}; Anthropic's API takes 'system', "
            "'user' and 'assistant'"
        )
    return "\n\n".join(system), others


def _unknown(sampling: Mapping[str, Any]) -> str | None:
    """Describe the parameters that the API lacks; None if there are none."""
    unknown = sorted(_UNKNOWN & set(sampling))
    if not unknown:
        return None
    return f"sampling_params has {names(unknown)}, which Anthropic's API does not take; remove it"


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sampling under OpenAI's names."""
    if problem := _unknown(sampling):
        raise SamplingRefused(problem)
    given = dict(sampling)
    if (most := given.pop("max_completion_tokens", None)) is not None:
        given.setdefault("max_tokens", most)
    if (stop := given.pop("stop", None)) is not None:
        given["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    return given


def _tool(schema: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that let the model answer by the input of a tool."""
    thinks = (extra.get("thinking") or {}).get("type", "disabled") != "disabled"
    choice = {"type": "auto"} if thinks else {"type": "tool", "name": _TOOL}
    tool = {"name": _TOOL, "description": "Give the answer.", "input_schema": dict(schema)}
    return {"tools": [tool], "tool_choice": choice}


def _is_block(block: Any) -> bool:
    """Return whether this is a content block; one of text has a text."""
    kind = getattr(block, "type", None)
    return isinstance(kind, str) and (
        kind != "text" or isinstance(getattr(block, "text", None), str)
    )


def _text(content: Sequence[Any], wrapped: bool) -> str:
    """Return the input of the answer's tool as JSON; the text if no tool was called."""
    for block in content:
        if block.type == "tool_use" and getattr(block, "name", None) == _TOOL:
            value = getattr(block, "input", None)
            if wrapped and isinstance(value, dict) and "answer" in value:
                value = value["answer"]
            return json.dumps(value, ensure_ascii=False)
    return "".join(block.text for block in content if block.type == "text")
