"""Workers, and a language model server and its batches, for tests of providers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.batch_server import Batches
from support.llm_server import KEY, Server
from support.warm_workers import ForkedBackend, workers_that_imported
from vane_dagster.compute.local_backend import LocalBackend


@pytest.fixture(scope="module")
def clients() -> Iterator[None]:
    """Fork workers from a process that has imported the clients of both APIs."""
    libraries = ("openai.resources.chat", "openai.resources.embeddings")
    with workers_that_imported(*libraries, "anthropic.resources.messages"):
        yield


@pytest.fixture(scope="module")
def backend(clients: None) -> Iterator[LocalBackend]:
    made = ForkedBackend(2)
    yield made
    made.close()


@pytest.fixture
def server(endpoint: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    """The endpoint with its counts at zero; a key is in the environment."""
    monkeypatch.setenv("LLM_KEY", KEY)
    found = endpoint[0]
    found.clear()
    return found


@pytest.fixture
def batches(server: Server) -> Batches:
    return server.batches
