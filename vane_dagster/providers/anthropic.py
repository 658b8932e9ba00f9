"""Any endpoint with Anthropic's Messages API."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.errors import names
from vane_dagster.providers.base import Answer, Message, Request, SamplingRefused
from vane_dagster.providers.http import HttpProvider, choice_schema, chosen, in_object

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
        )

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        client = self._connected()
        system, messages = _split(request.messages)
        known, extra = self._split_parameters(_parameters(request.sampling), ("max_tokens",))
        schema = choice_schema(request.choices) if request.choices else request.schema
        wrapped = schema is not None and schema.get("type") != "object"
        body: dict[str, Any] = {"system": system} if system else {}
        if schema is not None:
            body |= _tool(in_object(schema) if wrapped else schema, extra)
        body |= extra
        async with self._in_turn():
            began = time.perf_counter()
            found = await client.messages.create(
                model=self._model,
                messages=messages,
                max_tokens=known.get("max_tokens", _MAX_TOKENS),
                extra_body=body or None,
            )
        if getattr(found, "content", None) is None or found.usage is None:
            raise self._malformed(found)
        usage = found.usage
        cached = usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached
        self._tokens.learn(prompt + usage.output_tokens)
        text = _text(found.content, wrapped)
        return Answer(
            chosen(text) if request.choices else text,
            prompt,
            usage.output_tokens,
            cached,
            _REASONS.get(found.stop_reason, found.stop_reason or ""),
            time.perf_counter() - began,
        )


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


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sampling under OpenAI's names."""
    if unknown := sorted(_UNKNOWN & set(sampling)):
        raise SamplingRefused(
            f"sampling_params has {names(unknown)}, which Anthropic's API does not take; remove it"
        )
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


def _text(content: Sequence[Any], wrapped: bool) -> str:
    """Return the input of the answer's tool as JSON; the text if no tool was called."""
    for block in content:
        if block.type == "tool_use" and block.name == _TOOL:
            value = block.input
            if wrapped and isinstance(value, dict) and "answer" in value:
                value = value["answer"]
            return json.dumps(value, ensure_ascii=False)
    return "".join(block.text for block in content if block.type == "text")
