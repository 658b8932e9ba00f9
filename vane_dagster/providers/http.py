"""What providers of HTTP endpoints have in common: connection, limits, and kinds of errors."""

from __future__ import annotations

import abc
import asyncio
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from vane_dagster._arguments import number, positive
from vane_dagster._secrets import keep_variables
from vane_dagster.errors import ComputeError, described
from vane_dagster.providers.base import (
    Answer,
    EndpointRefused,
    Media,
    Message,
    Request,
)
from vane_dagster.providers.batch_api import BatchApi
from vane_dagster.providers.rate_limiter import RateLimiter
from vane_dagster.providers.registry import needs
from vane_dagster.providers.usage import token_count
from vane_dagster.servers.handle import ServerHandle
from vane_dagster.servers.launch import Endpoint

_MAX_SHOWN = 300
_TYPICAL_TOKENS = 500.0
REFUSED = frozenset({401, 402, 404})
"""Statuses by which an endpoint refuses all requests: the key, the account or the model."""
_NO_CREDIT = "insufficient_quota"
"""OpenAI's error code for an account without credit. Its status is 429, as for a rate limit."""
_DEFINED = ("$defs", "definitions")
"""The keys of the parts of a JSON schema to which references lead."""
_OF_CLIENT = {
    "api_key", "base_url", "timeout", "default_headers", "default_query", "extra_headers",
    "extra_query",
}  # fmt: skip
"""Arguments of the client, which are not fields of a request's body."""


class MalformedResponse(ConnectionError):
    """The endpoint answered in another form than its API's, for example because of a proxy."""


@dataclass
class _Turn:
    """The turn of a row.

    Attributes:
        client: The client of its endpoint.
        taken: Tokens taken from the limit for its first request; None once that was sent.
    """

    client: Any
    taken: float | None


_turn = ContextVar[_Turn | None]("turn", default=None)


class HttpProvider(abc.ABC):
    """An endpoint behind a client library, over one pool of aiohttp's connections."""

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
    LIBRARY: ClassVar[str]
    """The client library, which is also the name of its extra and of the provider."""
    CLIENT: ClassVar[str]
    """The name of the library's asynchronous client."""
    SERVER_PATH: ClassVar[str]
    """The path of the API at a server, as the client expects it."""
    PATH: ClassVar[str]
    """The path of its API for conversations."""
    CONTENT: ClassVar[frozenset[str]]
    """The content of messages that it takes; see `Provider.features`."""
    TOKENS: ClassVar[Sequence[str]]
    """The counts in the usage of a response that add up to its tokens."""
    BATCHES: ClassVar[type[BatchApi] | None] = None
    """Its batch API, if it has one."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "",
        timeout: float = 600.0,
        max_connections: int = 64,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        extra_body: Mapping[str, Any] | None = None,
        server: ServerHandle | None = None,
    ) -> None:
        self._api = needs(self.LIBRARY, self.LIBRARY)
        self._model, self._base_url, self._timeout = model, base_url, timeout
        self._key_env = self.key_variable({"api_key_env": api_key_env})
        self._rooms = defaultdict[Endpoint | None, asyncio.Semaphore](
            lambda: asyncio.Semaphore(max_connections)
        )
        self._requests = RateLimiter(requests_per_minute)
        self._tokens = RateLimiter(tokens_per_minute, _TYPICAL_TOKENS)
        self._extra = dict(extra_body or {})
        self._server = server
        self._clients: dict[tuple[str | None, str], Any] = {}

    @classmethod
    def check_options(cls, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """See `Provider`."""
        owner = "the options of the model"
        positive(owner, "max_connections", options.get("max_connections"))
        for name in ("timeout", "requests_per_minute", "tokens_per_minute"):
            number(owner, name, options.get(name), "a number above 0", lambda given: given > 0)
        server = options.get("server")
        for name, used in (("base_url", "address"), ("api_key_env", "key")):
            if server is not None and options.get(name) is not None:
                raise ValueError(
                    f"the options of the model have {name}, but the server's {used} is used"
                )
        body = {"extra_body": options.get("extra_body")}
        for where, given in ((owner, body), ("sampling_params", sampling)):
            if problem := _unsendable(where, given):
                raise ValueError(problem)

    @classmethod
    def features(cls, options: Mapping[str, Any]) -> frozenset[str]:
        """See `Provider`. vLLM's server returns reasoning if it has a parser for it."""
        flags = (getattr(options.get("server"), "keyed", None) or {}).get("flags")
        has_reasoning = flags is None or "reasoning_parser" in flags
        return cls.CONTENT | ({"reasoning"} if has_reasoning else set())

    @classmethod
    def key_variable(cls, options: Mapping[str, Any]) -> str | None:
        """See `Provider`. A server that the pipeline starts has its own API key."""
        if options.get("server") is not None:
            return None
        name: str | None = options.get("api_key_env", "")
        return f"{cls.LIBRARY.upper()}_API_KEY" if name == "" else name

    @classmethod
    def batch_api(cls, options: Mapping[str, Any]) -> BatchApi:
        """Connect to the provider's batch API, with the options of a stage."""
        assert cls.BATCHES is not None, "declaring the stage would have failed"
        library = needs(cls.LIBRARY, cls.LIBRARY)
        variable = cls.key_variable(options)
        client = getattr(library, cls.CLIENT.removeprefix("Async"))(
            api_key=_key_of(variable, ComputeError, "here"), base_url=options.get("base_url")
        )
        return cls.BATCHES(client, cls.PATH)

    def shared_by(self, workers: int) -> None:
        """Set the maximum number of workers, which share the limits."""
        self._requests.workers = self._tokens.workers = workers

    def _client(self, endpoint: Endpoint | None) -> Any:
        """Return the client of a replica, or of the only endpoint.

        It is another one if the key has changed since a warm worker's last run.
        """
        url, key, headers = self._base_url, "", None
        if endpoint is None:
            key = _key_of(self._key_env, EndpointRefused, "in the worker")
        else:
            url, key = endpoint.url + self.SERVER_PATH, endpoint.api_key or "none"
            # Servers expect a bearer token, whatever header the library sends the key in.
            headers = {"Authorization": f"Bearer {key}"}
        if (url, key) not in self._clients:
            self._clients[url, key] = getattr(self._api, self.CLIENT)(
                api_key=key,
                base_url=url,
                timeout=self._timeout,
                max_retries=0,
                default_headers=headers,
                http_client=self._api.DefaultAioHttpClient(),
            )
        return self._clients[url, key]

    def _fields(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request that options and sampling parameters set."""
        if problem := _unsendable("sampling_params", sampling):
            raise ValueError(problem)
        fields = {**self._extra, **sampling}
        body = fields.pop("extra_body", None)
        return {**fields, **(body or {})}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `Provider`."""
        with self._server.request() if self._server else nullcontext() as endpoint:
            async with self._rooms[endpoint]:
                token = _turn.set(_Turn(self._client(endpoint), await self._limited()))
                try:
                    yield
                finally:
                    _turn.reset(token)

    async def _limited(self) -> float:
        """Wait for the limits of a request; return the tokens that were taken for it."""
        await self._requests.take()
        return await self._tokens.take()

    async def submit(self, request: Request) -> Answer:
        """See `Provider.submit`."""
        return self.read(request, await self._post(self.PATH, self.body(request)))

    @abc.abstractmethod
    def body(self, request: Request) -> dict[str, Any]:
        """Return a request as the API expects it."""

    @abc.abstractmethod
    def read(self, request: Request, body: Any) -> Answer:
        """Return the answer in a response."""

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request in its turn, and return the response's JSON.

        The client's methods for each API take twice the processor's time of `post`. Errors of the
        whole stage are separated from those of a row.
        """
        import aiohttp

        if (turn := _turn.get()) is None:
            async with self.turn():
                return await self._post(path, body)
        taken, turn.taken = turn.taken, None
        if taken is None:  # a row may ask again in its turn
            taken = await self._limited()
        try:
            response = await turn.client.post(path, cast_to=object, body=body)
        except self._api.APIConnectionError as error:
            raise ConnectionError(f"{error.request.url}: {error.__cause__ or error}") from error
        except aiohttp.ClientError as error:  # a response that is not HTTP
            raise ConnectionError(str(error)) from error
        except ValueError as error:  # a response that is not JSON
            raise self._malformed(getattr(error, "doc", error)) from error
        except self._api.APIStatusError as error:
            if error.status_code in REFUSED or getattr(error, "code", None) == _NO_CREDIT:
                raise EndpointRefused(self._refusal(error)) from error
            raise
        tokens = sum(token_count(response, "usage", name) for name in self.TOKENS)
        self._tokens.learn(taken, tokens)
        return response

    @contextmanager
    def _reading(self, response: Any) -> Iterator[None]:
        """Raise MalformedResponse if a field is missing, or has another type than is read."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._malformed(response) from error

    def _malformed(self, response: Any) -> MalformedResponse:
        """Return the error for an answer in another form than the API's."""
        return MalformedResponse(
            f"the endpoint's response does not follow {self.LIBRARY}'s API: "
            f"{str(response)[:_MAX_SHOWN]!r}. If this happens for all rows, correct base_url"
        )

    def _refusal(self, error: Any) -> str:
        """Describe why an endpoint refuses all requests, and how to fix it."""
        key = f"the key of the variable {self._key_env!r}" if self._key_env else "no api_key_env"
        url = error.request.url
        asked = f"The request went to {url} for the model {self._model!r} with {key}"
        return f"{described(error)}. {asked}"


def _key_of(variable: str | None, error: type[Exception], where: str) -> str:
    """Return the key in an environment variable, or what stands for none."""
    key = os.environ.get(variable, "") if variable else "none"
    if not key:
        raise error(
            f"the environment variable {variable!r} is not set {where}: set it where the run is "
            f"launched, and name it in vd.Workers(env_vars=[{variable!r}])"
        )
    if variable:
        keep_variables({variable: key})
    return key


def _unsendable(where: str, fields: Mapping[str, Any]) -> str | None:
    """Describe a parameter that cannot be a field of a request's body; None if all can."""
    if wrong := sorted(_OF_CLIENT & set(fields)):
        return (
            f"{where} has {wrong[0]!r}, but sampling parameters are fields of the request's body, "
            "which the model's server reads: write base_url and timeout into the options of "
            "vd.Model, the variable with the key as its option 'api_key_env'; for other headers or "
            "queries, give a provider class whose client has them"
        )
    body = fields.get("extra_body")
    if not isinstance(body, (Mapping, type(None))):
        return f"{where}: an extra_body of type {type(body).__name__}; expected a dict of fields"
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return f"{where} has {name!r}, which cannot be sent: {error}"
    return None


def choice_schema(choices: Sequence[str]) -> Mapping[str, Any]:
    """Return a schema for one of some texts; endpoints require an object at the top level."""
    return in_object({"type": "string", "enum": list(choices)})


def in_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of an object whose only field is ``answer``."""
    defined = {name: schema[name] for name in _DEFINED if name in schema}  # references are absolute
    return {
        **defined,
        "type": "object",
        "properties": {"answer": {k: v for k, v in schema.items() if k not in defined}},
        "required": ["answer"],
        "additionalProperties": False,
    }


def converted(
    messages: Sequence[Message], convert: Callable[[Media], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return messages in the form of an API, with texts and converted media as their parts.

    Parts that a user's function wrote in this form already are unchanged.
    """

    def part(given: Any) -> Any:
        if isinstance(given, str):
            return {"type": "text", "text": given}
        return convert(given) if isinstance(given, Media) else given

    return [
        {**message, "content": [*map(part, content)] if isinstance(content, list) else content}
        for message in messages
        for content in [message["content"]]
    ]


def chosen(request: Request, text: str | None) -> str | None:
    """Return the choice in an answer, whether or not the endpoint follows schemas."""
    if not (request.choices and text):
        return text
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, TypeError, KeyError):
        return text
