"""How providers call the replicas of a server: their keys, and connections to each."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

import vane_dagster as vd
from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.openai import OpenAIProvider
from vane_dagster.servers import handle
from vane_dagster.servers.directory import Directory
from vane_dagster.servers.launch import Endpoint, own_node_id


@pytest.mark.parametrize(
    ("provider", "library"), [(OpenAIProvider, "openai"), (AnthropicProvider, "anthropic")]
)
def test_a_servers_key_is_a_bearer_token(provider, library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    made = provider("m", server=vd.VLLMServer("m").handle)
    client = made._client(Endpoint("http://127.0.0.1:1", api_key="key-of-server"))
    assert client.default_headers["Authorization"] == "Bearer key-of-server"


def test_connections_are_limited_for_each_replica(monkeypatch):
    pytest.importorskip("openai", reason="openai is not installed")
    llm = vd.VLLMServer("m", replicas=vd.Workers(3, max_concurrency=2))
    near = [Endpoint(f"http://near:{n}", node_id=own_node_id()) for n in (1, 2)]
    monkeypatch.setattr(handle, "directory", known := Directory())
    known.update({llm.key: [*near, Endpoint("http://far:1", node_id="other")]})
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    docs.prompt("answer", "{text}", model=llm)
    options = docs["answer"].spec.udf.constructor_kwargs["options"]
    in_flight, most = Counter[str](), Counter[str]()

    class Provider(OpenAIProvider):
        def _client(self, endpoint: Endpoint | None) -> Any:
            return Client(endpoint.url)

    @dataclass
    class Client:
        url: str

        async def post(self, path: str, **options: Any) -> None:
            in_flight[self.url] += 1
            most[self.url] = max(most[self.url], in_flight[self.url])
            await asyncio.sleep(0.01)
            in_flight[self.url] -= 1

    async def ask_often() -> None:
        provider = Provider("m", **options)
        await asyncio.gather(*(provider._post("/", {}) for _ in range(20)))

    asyncio.run(ask_often())
    assert most == {"http://near:1": 2, "http://near:2": 2}
