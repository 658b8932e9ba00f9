"""The contract of providers, over endpoints and classes of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import vane_dagster as vd
from support.llm_server import Server
from support.prompts import Reversed

# F403: all tests of the contract run here, over each provider.
from support.provider_contract import *  # noqa: F403  # the contract's tests
from support.provider_contract import SECRET, Arguments, Offered, quarantined
from vane_dagster.compute.local_backend import LocalBackend
from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.openai import OpenAIProvider
from vane_dagster.retries import is_transient
from vane_dagster.servers.launch import Endpoint

Maker = Callable[[Any, Server, str], Offered]

EMPTY = "the prompt is empty"
NULL_PROMPT = "column 'text' is null; a prompt needs it"
NULL_TEXT = "column 'text' is null; expected text"


def echoes(texts: Sequence[str]) -> list[str]:
    return [f"echo: {text}" for text in texts]


def lengths(texts: Sequence[str]) -> list[list[float]]:
    return [[float(len(text))] * 3 for text in texts]


def endpoint_arguments(provider: str, url: str, **options: Any) -> Arguments:
    given = {"base_url": url, "api_key_env": "LLM_KEY", **options}
    return {"provider": provider, "model": "m", "env_vars": ["LLM_KEY"], "options": given}


BAD = {
    None: NULL_PROMPT,
    " ": EMPTY,
    "refused": "BadRequestError: .*content policy",
    "too long": "BadRequestError: .*(too long|context length)",
}
WRONG_KEYS = [
    (
        {"options": {"api_key_env": "OTHER_KEY"}, "env_vars": ["OTHER_KEY"]},
        "Incorrect API key provided",
    ),
    (
        {"options": {"api_key_env": "UNSET_KEY"}, "env_vars": ["UNSET_KEY"]},
        "needs a key in the environment variable 'UNSET_KEY', which its workers do not have",
    ),
]
BODY = {"extra_body": {"a": 1}}


def openai(backend: Any, server: Server, url: str) -> Offered:
    arguments = endpoint_arguments("openai", url)
    wrong = ({"options": {"api": "x"}}, "unknown argument 'api' of vd.Model(options")
    return Offered(
        backend, "prompt", arguments, echoes, BAD, WRONG_KEYS, [wrong], BODY, server=server
    )


def openai_embeddings(backend: Any, server: Server, url: str) -> Offered:
    arguments = {"dimensions": 3, "normalize": False, **endpoint_arguments("openai", url)}
    bad = {None: NULL_TEXT, **{text: BAD[text] for text in ("refused", "too long")}}
    return Offered(backend, "embed", arguments, lengths, bad, WRONG_KEYS, keyed=BODY, server=server)


def anthropic(backend: Any, server: Server, url: str) -> Offered:
    arguments = endpoint_arguments("anthropic", url.removesuffix("/v1"))
    return Offered(backend, "prompt", arguments, echoes, BAD, WRONG_KEYS, keyed=BODY, server=server)


OWN = {"provider": Reversed, "model": "m"}


def own_prompt(backend: Any, server: Server, url: str) -> Offered:
    bad = {None: NULL_PROMPT, " ": EMPTY, "poison": "ValueError: no answer to this"}
    return Offered(
        backend, "prompt", OWN, lambda texts: [text[::-1] for text in texts], bad,
        keyed={"suffix": "!"},
    )  # fmt: skip


def own_embeddings(backend: Any, server: Server, url: str) -> Offered:
    arguments = {"dimensions": 3, "normalize": False, **OWN}
    return Offered(
        backend, "embed", arguments, lambda texts: [[len(text), 0, 1] for text in texts],
        {None: NULL_TEXT}, keyed={"suffix": "!"},
    )  # fmt: skip


ENDPOINTS: dict[str, Maker] = {
    "openai": openai,
    "openai embeddings": openai_embeddings,
    "anthropic": anthropic,
}
OWN_CLASSES = {"own prompt": own_prompt, "own embeddings": own_embeddings}
MAKERS = {**ENDPOINTS, **OWN_CLASSES}
TRANSIENT = ["busy", "broken", "overloaded", "cut", "page a", "login b", "half c", "null d",
             "error e"]  # fmt: skip
"""Texts for which the endpoint fails once; see `llm_server`."""


@pytest.fixture(params=MAKERS)
def offered(
    request: pytest.FixtureRequest,
    backend: LocalBackend,
    server: Server,
    endpoint: tuple[Server, str],
    monkeypatch: pytest.MonkeyPatch,
) -> Offered:
    monkeypatch.setenv("OTHER_KEY", SECRET)
    return MAKERS[request.param](backend, server, endpoint[1])


# Only of endpoints


def size(offered: Offered) -> int:
    """Rows of a request's batch; an embedding endpoint gets a batch as one request."""
    return 1 if offered.method == "embed" else 64


@pytest.mark.parametrize("offered", ["openai", "openai embeddings", "anthropic"], indirect=True)
def test_transient_errors_are_retried_for_their_rows_alone(offered, server, tmp_path):
    good = ["fine", *TRANSIENT, "also fine"]
    limit = {"on_error": "quarantine", "max_error_rate": 0.5}
    texts = [*good, "refused", "too long"]
    rows, _ = offered.compute(tmp_path, texts, batch_size=size(offered), **limit)
    offered.agree(rows, good)
    errors = [each["error"] for each in quarantined(tmp_path)]
    assert errors == ["BadRequestError", "BadRequestError"]
    assert server.requests == {text: 2 if text in TRANSIENT else 1 for text in texts}


@pytest.mark.parametrize("kind", [OpenAIProvider, AnthropicProvider])
def test_a_servers_key_is_a_bearer_token(kind):
    pytest.importorskip(kind.LIBRARY, reason="a client is not installed")
    made = kind("m", server=vd.VLLMServer("m"))
    client = made._client(Endpoint("http://127.0.0.1:1", api_key="key-of-server"))
    assert client.default_headers["Authorization"] == "Bearer key-of-server"


def test_errors_of_connections_are_transient_in_anthropics_client():
    """As in those of `tests/unit/test_retries.py`; to import this one takes two seconds."""
    error = pytest.importorskip("anthropic", reason="an optional library").APITimeoutError
    assert is_transient(error.__new__(error))
