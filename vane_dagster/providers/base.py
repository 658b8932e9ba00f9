"""What a provider is: a class that loads a model, or reaches one, and answers requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from vane_dagster.errors import StageError

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": ...}``"""


@dataclass(frozen=True)
class Request:
    """One question to a model.

    Attributes:
        messages: The conversation so far, the question last.
        sampling: ``temperature``, ``max_tokens``, ``top_p``, ``stop``, ``seed`` and what else the
            provider knows, under the names of OpenAI's chat API.
        schema: JSON schema that the answer has to fit; None for plain text.
        choices: Texts of which the answer has to be one; empty for any.
        id: The row's id, as text, for the provider's own logs.
    """

    messages: Sequence[Message]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] = ()
    id: str = ""


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
        text: The answer.
        prompt_tokens: Tokens of the messages.
        completion_tokens: Tokens of the answer.
        cached_tokens: Of the messages' tokens, those that the engine had computed before.
        finish_reason: ``"stop"``, or ``"length"`` where ``max_tokens`` has cut it.
        seconds: From its submission to its end.
        requests: How many it took.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = "stop"
    seconds: float = 0.0
    requests: int = 1


@runtime_checkable
class Provider(Protocol):
    """A way to a model. A class of your own is given as ``prompt(..., provider=MyProvider)``.

    A worker constructs it once with the model's name and the stage's `provider_options`, as
    keywords, and then submits one request for each row, many at the same time, in one event loop.

    Where it has them, these are used too: ``check_health()``, which raises when the model is dead;
    ``shared_by(workers)``, called with the most workers that there may be, for limits of them all;
    ``OPERATIONAL``, names of options that don't change answers, such as addresses and limits, and
    so are no part of fragment keys; one within an option is ``"option.name"``; ``PACKAGES``, names
    of modules whose packages' versions are recorded with the answers, beside those that it imports.
    """

    async def submit(self, request: Request) -> Answer:
        """Answers a request.

        Errors with an HTTP status, and those of connections, are tried again as the stage says.
        """


@runtime_checkable
class Embedder(Protocol):
    """A way to a model that embeds texts; constructed as a `Provider` is, which may be one too."""

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> Any:
        """Gives a vector for each text, as rows of floats, of so many numbers where given.

        Raises:
            RowErrors: For texts that can't be embedded, with the vectors of the others.
        """


@runtime_checkable
class Classifier(Protocol):
    """A model that has learnt its labels; constructed as a `Provider` is."""

    async def classify(
        self, texts: Sequence[str], labels: Sequence[str]
    ) -> Sequence[tuple[str, float]]:
        """Gives each text one of the labels, and how sure it is of it, from 0 to 1.

        Raises:
            StageError: If these are not its labels.
            RowErrors: For texts that can't be classified, with what came out for the others.
        """


class SamplingRefused(StageError):
    """Sampling parameters that a provider does not take; of one row, where it has its own."""


class PromptTooLong(ValueError):
    """A prompt has more tokens than the model takes."""
