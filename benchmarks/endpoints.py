"""Requests to an endpoint that answers after a second: providers against bare clients.

``python -m benchmarks.endpoints`` needs the extras `openai` and `anthropic`. Each run is a process
of its own and repeats are interleaved. The endpoint is a process too, so it needs a free core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

CONTENDERS = ("aiohttp", "client", "client on aiohttp", "openai", "anthropic")
MESSAGES = [{"role": "user", "content": "Which of these labels fits the text best? " * 4}]
TEXT = "word " * 60
CHAT = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}
    ],
    "usage": {"prompt_tokens": 40, "completion_tokens": 60, "total_tokens": 100},
}
MESSAGE = {
    "id": "1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": TEXT}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 40, "output_tokens": 60},
}


async def serve(seconds: float) -> None:
    """Serve both APIs until the process is killed; print the port first."""
    from aiohttp import web

    def answering(answer: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
        body = json.dumps(answer).encode()

        async def handle(request: web.Request) -> web.Response:
            await request.read()
            await asyncio.sleep(seconds)
            return web.Response(body=body, content_type="application/json")

        return handle

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answering(CHAT))
    app.router.add_post("/v1/messages", answering(MESSAGE))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def requester(contender: str, url: str, in_flight: int) -> Callable[[], Awaitable[Any]]:
    """Return a function that asks one question."""
    if contender == "aiohttp":
        import aiohttp

        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

        async def ask() -> Any:
            body = {"model": "m", "messages": MESSAGES}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                return json.loads(await response.read())

        return ask
    if contender.startswith("client"):
        import openai

        http = openai.DefaultAioHttpClient() if "aiohttp" in contender else None
        client = openai.AsyncOpenAI(
            api_key="none", base_url=f"{url}/v1", max_retries=0, http_client=http
        )
        return lambda: client.chat.completions.create(model="m", messages=MESSAGES)
    from vane_dagster.providers.anthropic import AnthropicProvider
    from vane_dagster.providers.base import Request
    from vane_dagster.providers.openai import OpenAIProvider

    kind, path = (OpenAIProvider, "/v1") if contender == "openai" else (AnthropicProvider, "")
    provider = kind(
        "m", base_url=url + path, api_key_env=None, timeout=600, max_connections=in_flight
    )
    return lambda: provider.submit(Request(MESSAGES))


async def measure(contender: str, url: str, requests: int, in_flight: int) -> None:
    """Print the requests a second, and the processor's time of each."""
    ask = requester(contender, url, in_flight)
    await ask()
    left = iter(range(requests))

    async def keep_asking() -> None:
        for _ in left:
            await ask()

    wall, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(keep_asking() for _ in range(in_flight)))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rate, each = requests / wall, processor / requests * 1000
    print(
        f"{contender:<18} {rate:6.0f} requests/s   {each:5.2f} ms of a core a request", flush=True
    )
    os._exit(0)  # as workers end, without closing their connections


def main() -> None:
    """Measure each contender in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of an answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", action="append", choices=CONTENDERS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url == "serve":
        asyncio.run(serve(given.seconds))
    if given.url:
        asyncio.run(measure(given.only[0], given.url, given.requests, given.in_flight))
    command = [sys.executable, "-m", "benchmarks.endpoints", *sys.argv[1:], "--url"]
    with subprocess.Popen([*command, "serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        try:
            for _ in range(given.runs):
                for contender in given.only or CONTENDERS:
                    one = [sys.executable, "-m", "benchmarks.endpoints", "--only", contender]
                    one += ["--requests", str(given.requests), "--url", url]
                    subprocess.run([*one, "--in-flight", str(given.in_flight)], check=True)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
