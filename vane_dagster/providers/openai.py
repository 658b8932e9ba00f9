"""Any endpoint with OpenAI's chat, completions and embeddings API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.http import HttpProvider, choice_schema, chosen
from vane_dagster.providers.usage import finish_reason, token_count
from vane_dagster.servers.handle import ServerHandle

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
_MISSING = object()


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
    SERVER_PATH = "/v1"

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
        server: ServerHandle | None = None,
    ) -> None:
        self.check_options({"api": api, "extra_body": extra_body}, {})
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
        self._completes = api == "completions"

    @classmethod
    def check_options(cls, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """See `HttpProvider.check_options`."""
        if (api := options.get("api", "chat")) not in _APIS:
            raise ValueError(
                f"the options of the model have api={api!r}; expected 'chat' or 'completions'"
            )
        super().check_options(options, sampling)

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        async with self._in_turn() as client:
            began = time.perf_counter()
            if self._completes:
                found = await self._completion(client, request)
            else:
                found = await self._chat(client, request)
        choices = getattr(found, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        # A message without content is an answer without text; a response without one is malformed.
        message = choice if self._completes else getattr(choice, "message", None)
        text = getattr(message, "text" if self._completes else "content", _MISSING)
        if not (text is None or isinstance(text, str)):
            raise self._malformed(found)
        answer = self._with_usage(found, text, choice, request, time.perf_counter() - began)
        return self._with_text(answer, text is None, getattr(message, "refusal", None))

    def _with_usage(
        self, found: Any, text: str | None, choice: Any, request: Request, seconds: float
    ) -> Answer:
        usage = getattr(found, "usage", None)
        if tokens := token_count(getattr(usage, "total_tokens", None)):
            self._tokens.learn(tokens)
        details = getattr(usage, "prompt_tokens_details", None)
        return Answer(
            chosen(text) if request.choices and text else text or "",
            token_count(getattr(usage, "prompt_tokens", None)),
            token_count(getattr(usage, "completion_tokens", None)),
            token_count(getattr(details, "cached_tokens", None)),
            finish_reason(getattr(choice, "finish_reason", None)),
            seconds,
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
        wanted = {} if dimensions is None else {"dimensions": dimensions}
        async with self._in_turn() as client:
            found = await client.embeddings.create(
                model=self._model, input=list(texts), encoding_format="float", **wanted
            )
        data = getattr(found, "data", None)
        if not (isinstance(data, list) and data and all(map(_is_vector, data))):
            raise self._malformed(found)
        if tokens := token_count(getattr(getattr(found, "usage", None), "total_tokens", None)):
            self._tokens.learn(tokens)
        return [one.embedding for one in sorted(data, key=lambda one: one.index)]


def _is_vector(one: Any) -> bool:
    vector = getattr(one, "embedding", None)
    return isinstance(getattr(one, "index", None), int) and isinstance(vector, list)
