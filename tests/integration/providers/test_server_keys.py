"""How providers send the key of a server."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.openai import OpenAIProvider


@pytest.mark.parametrize(
    ("provider", "library"), [(OpenAIProvider, "openai"), (AnthropicProvider, "anthropic")]
)
def test_a_servers_key_is_a_bearer_token(provider, library):
    pytest.importorskip(library)
    made = provider("m", server=vd.VLLMServer("m").handle)
    client = made._client("http://127.0.0.1:1", "key-of-server")
    assert client.default_headers["Authorization"] == "Bearer key-of-server"
