"""Any endpoint with OpenAI's chat, completions and embeddings API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.http import HttpProvider, choice_schema
from vane_dagster.providers.usage import finish_reason, token_count


class OpenAIProvider(HttpProvider):
    """Connects to an endpoint with the `openai` client."""

    LIBRARY = "openai"
    CLIENT = "AsyncOpenAI"
    SERVER_PATH = "/v1"
    APIS = ("chat", "completions")

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        fields, messages = self._fields(request.sampling), list(request.messages)
        is_completion = self._api_name == "completions"
        body: dict[str, Any] = {"model": self._model}
        schema = choice_schema(request.choices) if request.choices else request.schema
        if is_completion:
            body["prompt"] = "\n\n".join(message["content"] for message in messages)
        else:
            body["messages"] = messages
            if schema is not None:
                named = {"name": "answer", "schema": dict(schema)}
                body["response_format"] = {"type": "json_schema", "json_schema": named}
        path = "/completions" if is_completion else "/chat/completions"
        found = await self._post(path, body | fields)
        with self._reading(found):
            choice = found["choices"][0]
            # A message without content is an answer without text.
            text = choice["text"] if is_completion else choice["message"].get("content")
            refusal = None if is_completion else choice["message"].get("refusal")
            reason = finish_reason(choice.get("finish_reason"))
            if not (text is None or isinstance(text, str)):
                raise self._malformed(found)
        self._tokens.learn(token_count(found, "usage", "total_tokens"))
        counts = (
            token_count(found, "usage", "prompt_tokens"),
            token_count(found, "usage", "completion_tokens"),
            token_count(found, "usage", "prompt_tokens_details", "cached_tokens"),
        )
        return self._answer(request, text, counts, reason, refusal)

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """See `Embedder.embed`."""
        body = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        wanted = {} if dimensions is None else {"dimensions": dimensions}
        found = await self._post("/embeddings", body | wanted)
        with self._reading(found):
            data = sorted(found["data"], key=lambda one: int(one["index"]))
            vectors = [one["embedding"] for one in data]
            is_complete = [int(one["index"]) for one in data] == list(range(len(texts)))
            if not (is_complete and all(isinstance(vector, list) for vector in vectors)):
                raise self._malformed(found)
        self._tokens.learn(token_count(found, "usage", "total_tokens"))
        return vectors
