"""Any endpoint with OpenAI's chat and embeddings API."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from vane_dagster._secrets import keep_variables
from vane_dagster.errors import StageError
from vane_dagster.providers.base import Answer, PromptTooLong, Request
from vane_dagster.providers.rate_limiter import RateLimiter
from vane_dagster.providers.registry import needs

_PARAMETERS = frozenset(
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

_MAX_SHOWN = 300


class OpenAIProvider:
    """Connects to an endpoint with the `openai` client, over one connection pool.

    Args:
        model: The model's name at the endpoint.
        base_url: The endpoint. Default: ``$OPENAI_BASE_URL``, else OpenAI's own.
        api_key_env: Name of the environment variable that holds the key. It must also be in the
            stage's `env_vars`. None if the endpoint needs no key.
        timeout: Time limit of an answer in seconds.
        max_connections: Concurrent requests.
        requests_per_minute: The request limit of all workers together, divided evenly; None for no
            limit.
        tokens_per_minute: The same limit for tokens, prompts and answers together.
        extra_body: Additional fields of each request.
    """

    OPERATIONAL = frozenset(
        {
            "base_url",
            "api_key_env",
            "timeout",
            "max_connections",
            "requests_per_minute",
            "tokens_per_minute",
        }
    )

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        timeout: float = 600.0,
        max_connections: int = 64,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self._api = needs("openai", "openai", "openai")
        self._model = model
        self._base_url, self._key_env, self._timeout = base_url, api_key_env, timeout
        self._room = asyncio.Semaphore(max_connections)
        self._requests = RateLimiter(requests_per_minute)
        self._tokens = RateLimiter(tokens_per_minute)
        self._extra = dict(extra_body or {})
        self._client: Any = None
        self._key = ""

    def shared_by(self, workers: int) -> None:
        """Set the maximum number of workers, which share the limits."""
        self._requests.workers = self._tokens.workers = workers

    def _connected(self) -> Any:
        """Return the client, recreated if the key has changed since a warm worker's last run."""
        key = os.environ.get(self._key_env, "") if self._key_env else "none"
        if not key:
            raise StageError(
                f"the environment variable {self._key_env!r} is not set in the worker: set it "
                f"where the run is launched, and name it in env_vars=[{self._key_env!r}]"
            )
        if self._client is None or key != self._key:
            if self._key_env:
                keep_variables({self._key_env: key})
            self._key = key
            self._client = self._api.AsyncOpenAI(
                api_key=key, base_url=self._base_url, timeout=self._timeout, max_retries=0
            )
        return self._client

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        client = self._connected()
        wanted = dict(request.sampling)
        schema = _choice_schema(request.choices) if request.choices else request.schema
        if schema is not None:
            named = {"name": "answer", "schema": dict(schema)}
            wanted["response_format"] = {"type": "json_schema", "json_schema": named}
        known = {name: wanted.pop(name) for name in list(wanted) if name in _PARAMETERS}
        async with self._in_turn():
            began = time.perf_counter()
            found = await client.chat.completions.create(
                model=self._model,
                messages=list(request.messages),
                extra_body={**self._extra, **wanted} or None,
                **known,
            )
        usage, choice = found.usage, found.choices[0]
        if usage is not None:
            self._tokens.learn(usage.total_tokens)
        cached = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", 0)
        text = choice.message.content or ""
        return Answer(
            _chosen(text) if request.choices else text,
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            cached or 0,
            choice.finish_reason or "",
            time.perf_counter() - began,
        )

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """See `Embedder.embed`."""
        client = self._connected()
        wanted = {} if dimensions is None else {"dimensions": dimensions}
        async with self._in_turn():
            found = await client.embeddings.create(
                model=self._model, input=list(texts), encoding_format="float", **wanted
            )
        if found.usage is not None:
            self._tokens.learn(found.usage.total_tokens)
        return [one.embedding for one in sorted(found.data, key=lambda one: one.index)]

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait for a request's turn; separate errors of the whole stage from those of a row."""
        async with self._room:
            await self._requests.take(1)
            await self._tokens.take(self._tokens.typical)
            try:
                yield
            except (
                self._api.AuthenticationError,
                self._api.PermissionDeniedError,
                self._api.NotFoundError,
            ) as error:
                raise StageError(self._refusal(error)) from error
            except self._api.APIConnectionError as error:
                detail = (
                    f"{type(error).__name__} at {error.request.url}: {error.__cause__ or error}"
                )
                raise ConnectionError(detail) from error
            except self._api.BadRequestError as error:
                if "context length" in str(error) or "too long" in str(error):
                    raise PromptTooLong(str(error)) from error
                raise

    def _refusal(self, error: Any) -> str:
        """Describe why an endpoint refuses all requests, and how to fix it."""
        detail = f"{type(error).__name__}: {error}"
        if error.body and "message" not in error.body:  # a form that the client omits
            detail += f" - {str(error.body)[:_MAX_SHOWN]}"
        if isinstance(error, self._api.NotFoundError):
            return (
                f"{detail}. The request was to {error.request.url}, for the model {self._model!r}"
            )
        if self._key_env is None:
            return f"{detail}. No key was given: name its variable by api_key_env"
        return f"{detail}. The key is that of the environment variable {self._key_env!r}"


def _choice_schema(choices: Sequence[str]) -> Mapping[str, Any]:
    """Return a schema for one of some texts; endpoints require an object at the top level."""
    answer = {"type": "string", "enum": list(choices)}
    properties = {"answer": answer}
    return {
        "type": "object",
        "properties": properties,
        "required": ["answer"],
        "additionalProperties": False,
    }


def _chosen(text: str) -> str:
    """Return the choice in an answer, whether or not the endpoint follows schemas."""
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, TypeError, KeyError):
        return text
