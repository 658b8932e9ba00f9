"""Any endpoint with OpenAI's chat, completions and embeddings API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.http import HttpProvider, choice_schema, chosen

_CHAT = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "n",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "temperature",
        "top_p",
    }
)
"""Parameters that the client takes by name; all others are added to the body unchanged."""
_COMPLETIONS = _CHAT - {"max_completion_tokens", "reasoning_effort", "response_format"}
"""The same for completions."""
_APIS = ("chat", "completions")


class OpenAIProvider(HttpProvider):
    """Connects to an endpoint with the `openai` client, over one connection pool.

    Args:
        model: The model's name at the endpoint.
        api: "chat" for ``/v1/chat/completions``; "completions" for ``/v1/completions``, where the
            contents of the messages, joined by blank lines, are the prompt. Completions are not
            constrained to a schema, except by `extra_body`.
        base_url: The endpoint. Default: ``$OPENAI_BASE_URL``, else OpenAI's own.
        api_key_env: See `HttpProvider`.
        timeout: See `HttpProvider`.
        max_connections: See `HttpProvider`.
        requests_per_minute: See `HttpProvider`.
        tokens_per_minute: See `HttpProvider`.
        extra_body: See `HttpProvider`. `sampling_params` may have an ``extra_body`` too, whose
            fields take precedence.

    Raises:
        ValueError: If `api` is neither of these.
    """

    LIBRARY = "openai"
    CLIENT = "AsyncOpenAI"

    def __init__(
        self,
        model: str,
        *,
        api: str = "chat",
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        timeout: float = 600.0,
        max_connections: int = 64,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if api not in _APIS:
            raise ValueError(f"api is {api!r}; expected 'chat' or 'completions'")
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
        self._completes = api == "completions"

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        client = self._connected()
        async with self._in_turn():
            began = time.perf_counter()
            if self._completes:
                found = await self._completion(client, request)
            else:
                found = await self._chat(client, request)
        if not getattr(found, "choices", None):
            raise self._malformed(found)
        usage, choice = found.usage, found.choices[0]
        if usage is not None:
            self._tokens.learn(usage.total_tokens)
        cached = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", 0)
        text = (choice.text if self._completes else getattr(choice.message, "content", "")) or ""
        return Answer(
            chosen(text) if request.choices else text,
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            cached or 0,
            choice.finish_reason or "",
            time.perf_counter() - began,
        )

    async def _chat(self, client: Any, request: Request) -> Any:
        known, extra = self._split_parameters(request.sampling, _CHAT)
        schema = choice_schema(request.choices) if request.choices else request.schema
        if schema is not None:
            named = {"name": "answer", "schema": dict(schema)}
            known["response_format"] = {"type": "json_schema", "json_schema": named}
        return await client.chat.completions.create(
            model=self._model, messages=list(request.messages), extra_body=extra or None, **known
        )

    async def _completion(self, client: Any, request: Request) -> Any:
        known, extra = self._split_parameters(request.sampling, _COMPLETIONS)
        prompt = "\n\n".join(message["content"] for message in request.messages)
        return await client.completions.create(
            model=self._model, prompt=prompt, extra_body=extra or None, **known
        )

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """See `Embedder.embed`."""
        client = self._connected()
        wanted = {} if dimensions is None else {"dimensions": dimensions}
        async with self._in_turn():
            found = await client.embeddings.create(
                model=self._model, input=list(texts), encoding_format="float", **wanted
            )
        if not getattr(found, "data", None):
            raise self._malformed(found)
        if found.usage is not None:
            self._tokens.learn(found.usage.total_tokens)
        return [one.embedding for one in sorted(found.data, key=lambda one: one.index)]
