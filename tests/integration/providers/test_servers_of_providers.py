"""How providers call the replicas of a server: their keys, and connections to each."""

from __future__ import annotations

import asyncio
from collections import Counter

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
    pytest.importorskip(library)
    made = provider("m", server=vd.VLLMServer("m").handle)
    client = made._client("http://127.0.0.1:1", "key-of-server")
    assert client.default_headers["Authorization"] == "Bearer key-of-server"


def test_connections_are_limited_for_each_replica(monkeypatch):
    pytest.importorskip("openai")
    llm = vd.VLLMServer("m", replicas=vd.Workers(3, max_concurrency=2))
    near = [Endpoint(f"http://near:{n}", node_id=own_node_id()) for n in (1, 2)]
    monkeypatch.setattr(handle, "directory", known := Directory())
    known.update({llm.key: [*near, Endpoint("http://far:1", node_id="other")]})
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    docs.prompt("answer", "{text}", model=llm)
    options = docs["answer"].spec.udf.constructor_kwargs["options"]
    provider = OpenAIProvider("m", **options)
    in_flight, most = Counter[str](), Counter[str]()

    async def ask() -> None:
        async with provider._in_turn() as client:
            url = str(client.base_url)
            in_flight[url] += 1
            most[url] = max(most[url], in_flight[url])
            await asyncio.sleep(0.01)
            in_flight[url] -= 1

    async def ask_often() -> None:
        await asyncio.gather(*(ask() for _ in range(20)))

    asyncio.run(ask_often())
    assert most == {"http://near:1/v1/": 2, "http://near:2/v1/": 2}
