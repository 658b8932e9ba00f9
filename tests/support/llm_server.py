"""A server that speaks OpenAI's chat API, and fails in typical ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator

KEY = "sk-a-key-of-the-tests"


class Server:
    """Echoes prompts; some words in them make it fail.

    Attributes:
        requests: Number of requests per prompt.
        times: Times of the requests.
        most: The maximum number of concurrent requests.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.times: list[float] = []
        self.most = self.now = 0
        self.seconds = 0.0
        self.answers: dict[str, list[str]] = {}

    async def chat(self, request):
        from starlette.responses import JSONResponse, Response

        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)
        body = json.loads(await request.body())
        prompt = body["messages"][-1]["content"]
        self.bodies.append(body)
        self.requests[prompt] += 1
        self.times.append(time.monotonic())
        first = self.requests[prompt] == 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
            if "busy" in prompt and first:
                return JSONResponse({"error": {"message": "slow down"}}, 429, {"Retry-After": "0"})
            if "broken" in prompt and first:
                return JSONResponse({"error": {"message": "oops"}}, 500)
            if "cut" in prompt and first:
                return Response(b'{"id": "x", "cho', headers={"content-length": "500"})
            if "refused" in prompt:
                return JSONResponse({"error": {"message": "content policy"}}, 400)
            if "long" in prompt:
                message = "This model's maximum context length is 10 tokens"
                return JSONResponse({"error": {"message": message}}, 400)
        finally:
            self.now -= 1
        users = [m["content"] for m in body["messages"] if m["role"] == "user"]
        given = self.answers.get(users[0])
        text = given[min(len(users), len(given)) - 1] if given else f"echo: {prompt}"
        tokens = len(prompt.split())
        return JSONResponse(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": text},
                    }
                ],
                "usage": {
                    "prompt_tokens": tokens,
                    "completion_tokens": len(text.split()),
                    "total_tokens": tokens + len(text.split()),
                    "prompt_tokens_details": {"cached_tokens": 1},
                },
            }
        )

    async def embeddings(self, request):
        from starlette.responses import JSONResponse

        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "Incorrect API key provided"}}, 401)
        body = json.loads(await request.body())
        self.bodies.append(body)
        size = body.get("dimensions", 4)
        data = [
            {"object": "embedding", "index": i, "embedding": [float(len(text))] * size}
            for i, text in enumerate(body["input"])
        ]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        # The API does not guarantee the order of embeddings.
        return JSONResponse(
            {"object": "list", "model": body["model"], "data": data[::-1], "usage": usage}
        )


@contextlib.contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    """Yield the server and its base URL."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    server = Server()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/embeddings", server.embeddings, methods=["POST"]),
        ]
    )
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield server, f"http://127.0.0.1:{port}/v1"
    running.should_exit = True
    thread.join()
