"""The provider interface: a class that loads or connects to a model, and answers requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vane_dagster.errors import StageError

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant", "content": ...}``

The content is text, or in a user's message with `Media` a list of texts and `Media`.
"""


@dataclass(frozen=True)
class Media:
    """A part of a message that is not text.

    Attributes:
        kind: "image", "audio" or "document".
        media_type: The type of the file, such as "image/png"; empty if there is a URL.
        data: The bytes of the file; empty if there is a URL.
        url: The URL that the model's server fetches; empty if there is a file.
        detail: See `vd.image`.
    """

    kind: str
    media_type: str = ""
    data: bytes = field(default=b"", repr=False)
    url: str = field(default="", repr=False)
    detail: str | None = None

    @property
    def base64(self) -> str:
        """The bytes of the file in base64."""
        return base64.b64encode(self.data).decode()

    @property
    def any_url(self) -> str:
        """The URL; a ``data:`` URL of the file if there is one."""
        return self.url or f"data:{self.media_type};base64,{self.base64}"


@dataclass(frozen=True)
class Request:
    """One request to a model.

    Attributes:
        messages: The conversation so far, ending with the question.
        sampling: ``temperature``, ``max_tokens``, ``top_p``, ``stop``, ``seed`` and other
            parameters of the provider, under the names of OpenAI's chat API.
        schema: JSON schema that the answer must fit; None for plain text.
        choices: The only valid answers; empty for any answer.
        id: The row's id, as text, for the provider's own logs; empty if rows are reused, unless it
            is among the columns that the stage names.
        adapter: The folder of a LoRA adapter; empty for the model alone.
    """

    messages: Sequence[Message]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] = ()
    id: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class Answer:
    """A model's answer.

    Attributes:
        text: The answer.
        prompt_tokens: Tokens of the messages.
        completion_tokens: Tokens of the answer.
        cached_tokens: Tokens of the messages that were in the engine's cache.
        finish_reason: ``"stop"``, or ``"length"`` if ``max_tokens`` truncated the answer.
        seconds: Seconds from the submission to the end of the answer. The stage measures them.
        requests: The number of requests.
        batch_requests: The number of these that a batch of the provider has answered.
        reasoning: The model's reasoning, which is not part of the text; None without any.
        reasoning_tokens: Tokens of the reasoning, which are among those of the answer.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = "stop"
    seconds: float = 0.0
    requests: int = 1
    batch_requests: int = 0
    reasoning: str | None = None
    reasoning_tokens: int = 0


class Provider(Protocol):
    """Access to a model. To use a class of your own, pass ``prompt(..., provider=MyProvider)``.

    A worker constructs it once, with the model's name and the options of the stage's `vd.Model` as
    keywords. It then submits one request for each row, many concurrently, in one event loop.

    These members are optional:

    - ``check_health()`` raises if the model is dead.
    - ``turn()`` returns an async context manager, which is held while a row's requests are sent:
      it waits for connections and rate limits. The time limit of the row begins then.
    - ``shared_by(workers)`` is called with the maximum number of workers, to divide shared limits.
    - ``check_options(options, sampling)``, a classmethod, raises ValueError for invalid provider
      options or sampling parameters when a stage is declared.
    - ``features(options)``, a classmethod, returns what it takes besides texts, of "image", "audio"
      and "document"; "image url" and "document url", if the model's server fetches URLs; "image
      detail"; "adapter", if it follows `Request.adapter`; and "reasoning", if it fills
      `Answer.reasoning`. A stage that asks for anything else is refused when it is declared.
      Without this method, it takes texts alone.
    - ``key_variable(options)``, a classmethod, returns the name of the environment variable that
      holds the provider's key, or None. A run fails before it loads anything if it is not set.
    - ``OPERATIONAL`` names the options that do not change answers, such as addresses and limits.
      They are not part of fragment keys. A nested option is named ``"option.name"``.
    - ``PACKAGES`` names modules. The versions of their packages are recorded with the answers,
      besides those of the packages that the provider imports.
    """

    async def submit(self, request: Request) -> Answer:
        """Answer a request.

        Connection errors, and errors with an HTTP status, are retried as the stage declares.
        """


class Embedder(Protocol):
    """Access to a model that embeds texts; constructed like a `Provider`, and may be both."""

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """Embed texts.

        Args:
            texts: The texts.
            dimensions: The length of the vectors; None for the model's own.

        Returns:
            One vector for each text; shape ``(len(texts), dimensions)``.

        Raises:
            RowErrors: For texts that cannot be embedded, with the vectors of the others.
        """


class EndpointRefused(StageError):
    """An endpoint that refuses all requests, whatever their partition: the key or the model."""


class PromptTooLong(ValueError):
    """A prompt has more tokens than the model accepts."""
