"""Any endpoint with Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.providers.base import Answer, Media, Message, Request
from vane_dagster.providers.batch_api import AnthropicBatches
from vane_dagster.providers.format import finished
from vane_dagster.providers.http import HttpProvider, choice_schema, chosen, converted, in_object
from vane_dagster.providers.usage import finish_reason, token_count

_MAX_TOKENS = 4096
"""The API requires a limit; this is the one of stages without a limit of their own."""
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
    ``stop_sequences``, and ``max_completion_tokens`` becomes ``max_tokens`` (4096 if the stage sets
    none). All others are added to the body unchanged; the API refuses those that it lacks, such as
    ``seed``.

    With a `return_format` the model must call a tool whose input has that schema, and the input is
    the answer; with extended thinking, where the API has no such obligation, it may.

    Its arguments are those of `HttpProvider`.
    """

    LIBRARY = "anthropic"
    CLIENT = "AsyncAnthropic"
    SERVER_PATH = ""
    PATH = "/v1/messages"
    CONTENT = frozenset({"image", "image url", "document", "document url"})
    TOKENS = (
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
    )
    BATCHES = AnthropicBatches

    def body(self, request: Request) -> dict[str, Any]:
        """See `HttpProvider.body`."""
        system, messages = _split(request.messages)
        fields = self._fields(_parameters(request.sampling))
        schema, wrapped = _schema(request)
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": _MAX_TOKENS,
        }
        if system:
            body["system"] = system
        if schema is not None:
            body |= _tool(in_object(schema) if wrapped else schema, fields)
        return body | fields

    def read(self, request: Request, body: Any) -> Answer:
        """See `HttpProvider.read`."""
        with self._reading(body):
            text = _text(body["content"], _schema(request)[1])
            thoughts = [b["thinking"] for b in body["content"] if b["type"] == "thinking"]
            reasoning = "\n\n".join(filter(None, thoughts))
            reason = finish_reason(body.get("stop_reason"))
        details = body.get("stop_details")
        prompt, written, cached, answered = (
            token_count(body, "usage", name) for name in self.TOKENS
        )
        refusal = details.get("explanation") if isinstance(details, dict) else None
        counts = prompt + written + cached, answered, cached, _REASONS.get(reason, reason)
        thought = token_count(body, "usage", "output_tokens_details", "thinking_tokens")
        answer = Answer("", *counts, reasoning=reasoning, reasoning_tokens=thought)
        return finished(chosen(request, text), answer, refusal)


def _schema(request: Request) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the schema of an answer, and whether an object has to be put around it."""
    schema = choice_schema(request.choices) if request.choices else request.schema
    return schema, schema is not None and schema.get("type") != "object"


def _split(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """Separate the system messages, which are not part of the API's conversation."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return "\n\n".join(system), converted(others, _block)


def _block(part: Media) -> dict[str, Any]:
    source = {"type": "url", "url": part.url}
    if not part.url:
        source = {"type": "base64", "media_type": part.media_type, "data": part.base64}
    return {"type": part.kind, "source": source}


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert sampling under OpenAI's names."""
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


def _text(content: Any, wrapped: bool) -> str:
    """Return the input of the answer's tool as JSON; the text if no tool was called."""
    for block in content:
        if block["type"] == "tool_use" and block.get("name") == _TOOL:
            value = block.get("input")
            if wrapped and isinstance(value, dict) and "answer" in value:
                value = value["answer"]
            return json.dumps(value, ensure_ascii=False)
    return "".join(block["text"] for block in content if block["type"] == "text")
