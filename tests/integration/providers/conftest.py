"""A language model server that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.llm_server import KEY, Server, serving


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[Server, str]]:
    with serving() as (server, url):
        yield server, url


@pytest.fixture
def server(endpoint: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    """The endpoint with its counts at zero; a key is in the environment."""
    monkeypatch.setenv("LLM_KEY", KEY)
    found = endpoint[0]
    found.clear()
    return found
