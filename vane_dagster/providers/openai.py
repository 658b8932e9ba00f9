"""Any endpoint with OpenAI's chat and embeddings API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vane_dagster.providers.base import Answer, Media, Message, Request
from vane_dagster.providers.batch_api import OpenAIBatches
from vane_dagster.providers.format import finished
from vane_dagster.providers.http import HttpProvider, choice_schema, chosen, converted
from vane_dagster.providers.usage import finish_reason, token_count
from vane_dagster.servers.handle import VLLM

_FORMATS = {"mpeg": "mp3", "mp4": "m4a"}
"""Formats of audio whose names differ from their media types."""


class OpenAIProvider(HttpProvider):
    """Connects to an endpoint with the `openai` client."""

    LIBRARY = "openai"
    CLIENT = "AsyncOpenAI"
    SERVER_PATH = "/v1"
    PATH = "/chat/completions"
    CONTENT = frozenset({"image", "image url", "image detail", "audio", "document"})
    TOKENS = ("total_tokens",)
    BATCHES = OpenAIBatches

    def body(self, request: Request) -> dict[str, Any]:
        """See `HttpProvider.body`."""
        body: dict[str, Any] = {"model": self._model}
        body["messages"] = chat_messages(request.messages)
        schema = request.schema
        if request.choices and self._server is not None and self._server.kind == VLLM:
            body["structured_outputs"] = {"choice": list(request.choices)}  # shorter than JSON
        elif request.choices:
            schema = choice_schema(request.choices)
        if schema is not None:
            named = {"name": "answer", "schema": dict(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body | self._fields(request.sampling)

    def read(self, request: Request, body: Any) -> Answer:
        """See `HttpProvider.read`."""
        with self._reading(body):
            choice = body["choices"][0]
            message = choice["message"]
            # A message without content is an answer without text.
            text, refusal = message.get("content"), message.get("refusal")
            reason = finish_reason(choice.get("finish_reason"))
            if not (text is None or isinstance(text, str)):
                raise self._malformed(body)
        details = "completion_tokens_details"
        answer = Answer(
            "",
            token_count(body, "usage", "prompt_tokens"),
            token_count(body, "usage", "completion_tokens"),
            token_count(body, "usage", "prompt_tokens_details", "cached_tokens"),
            reason,
            # vLLM and OpenRouter use the first name, DeepSeek and SGLang the second.
            reasoning=message.get("reasoning") or message.get("reasoning_content"),
            reasoning_tokens=token_count(body, "usage", details, "reasoning_tokens"),
        )
        return finished(chosen(request, text), answer, refusal)

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """See `Embedder.embed`."""
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        wanted = {} if dimensions is None else {"dimensions": dimensions}
        response = await self._post("/embeddings", body | wanted)
        with self._reading(response):
            data = sorted(response["data"], key=lambda one: int(one["index"]))
            vectors = [one["embedding"] for one in data]
            is_complete = [int(one["index"]) for one in data] == list(range(len(texts)))
            if not (is_complete and all(isinstance(vector, list) for vector in vectors)):
                raise self._malformed(response)
        return vectors


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's chat API."""
    return converted(messages, _media)


def _media(part: Media) -> dict[str, Any]:
    if part.kind == "image":
        detail = {} if part.detail is None else {"detail": part.detail}
        return {"type": "image_url", "image_url": {"url": part.any_url, **detail}}
    if part.kind == "audio":
        subtype = part.media_type.partition("/")[2]
        sound = {"data": part.base64, "format": _FORMATS.get(subtype, subtype)}
        return {"type": "input_audio", "input_audio": sound}
    return {"type": "file", "file": {"filename": "document.pdf", "file_data": part.any_url}}
