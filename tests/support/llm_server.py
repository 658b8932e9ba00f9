"""A server that speaks OpenAI's API and Anthropic's, and fails in typical ways."""

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
        most: The maximum number of concurrent requests.
        responses: The bodies of the responses to some prompts, instead of an echo.
        vectors: The body of the responses with vectors, instead of vectors of lengths.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.most = self.now = 0
        self.seconds = 0.0
        self.answers: dict[str, list[str]] = {}
        self.responses: dict[str, bytes] = {}
        self.vectors = b""

    async def chat(self, request):
        from starlette.responses import JSONResponse

        if failed := _unauthorized(request):
            return failed
        body = json.loads(await request.body())
        prompt = body["messages"][-1]["content"]
        if failed := await self._failed(body, prompt):
            return failed
        text = self._answer(body["messages"], prompt)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse(_completion(body, "chat.completion", choice, prompt, text))

    async def completions(self, request):
        from starlette.responses import JSONResponse

        if failed := _unauthorized(request):
            return failed
        body = json.loads(await request.body())
        prompt = body["prompt"]
        if failed := await self._failed(body, prompt):
            return failed
        questions = prompt.split("\n\n")[::2]  # in between are answers
        text = self._answer([{"role": "user", "content": each} for each in questions], prompt)
        choice = {"index": 0, "finish_reason": "length", "text": text, "logprobs": None}
        return JSONResponse(_completion(body, "text_completion", choice, prompt, text))

    async def messages(self, request):
        """Anthropic's Messages API; with a tool, the answer is its input if it is JSON."""
        from starlette.responses import JSONResponse

        if failed := _unauthorized(request):
            return failed
        if "anthropic-version" not in request.headers:
            return _error("anthropic-version: header is required", 400)
        body = json.loads(await request.body())
        if wrong := {m["role"] for m in body["messages"]} - {"user", "assistant"}:
            return _error(f"messages: unexpected role {wrong}", 400)
        prompt = body["messages"][-1]["content"]
        if failed := await self._failed(body, prompt):
            return failed
        text = self._answer(body["messages"], prompt)
        content = [{"type": "text", "text": text}]
        reason = "end_turn"
        if body.get("tools"):
            with contextlib.suppress(ValueError):
                given, tool = json.loads(text), body["tools"][0]["name"]
                used = {"type": "tool_use", "id": "t1", "name": tool, "input": given}
                content, reason = [used], "tool_use"
        words = len(text.split())
        if words > body["max_tokens"]:
            reason = "max_tokens"
        return JSONResponse(
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": body["model"],
                "content": content,
                "stop_reason": reason,
                "stop_sequence": None,
                "usage": {
                    "input_tokens": len(prompt.split()),
                    "cache_creation_input_tokens": 2,
                    "cache_read_input_tokens": 1,
                    "output_tokens": words,
                },
            }
        )

    async def _failed(self, body, *prompts):
        """Count a request, and return the response that a word in it asks for."""
        self.bodies.append(body)
        self.requests.update(prompts)
        first = {prompt: self.requests[prompt] == 1 for prompt in prompts}
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        failures = (self._failure(prompt, first[prompt]) for prompt in prompts)
        return next(filter(None, failures), None)

    def _failure(self, prompt, first):
        from starlette.responses import Response

        if "busy" in prompt and first:
            return _error("slow down", 429, {"Retry-After": "0"})
        if "broken" in prompt and first:
            return _error("oops", 500)
        if "overloaded" in prompt and first:
            return _error("Overloaded", 529, {"Retry-After": "0"})
        if "cut" in prompt and first:
            return Response(b'{"id": "x", "cho', headers={"content-length": "500"})
        if (found := _MALFORMED.get(prompt.partition(" ")[0])) and first:
            return Response(found[0], headers={"content-type": found[1]})
        if prompt in self.responses:
            return Response(self.responses[prompt], headers={"content-type": "application/json"})
        if "refused" in prompt:
            return _error("content policy", 400)
        if "long" in prompt:
            return _error("This model's maximum context length is 10 tokens", 400)
        return None

    def _answer(self, messages, prompt):
        users = [m["content"] for m in messages if m["role"] == "user"]
        given = self.answers.get(users[0])
        return given[min(len(users), len(given)) - 1] if given else f"echo: {prompt}"

    async def embeddings(self, request):
        from starlette.responses import JSONResponse, Response

        if failed := _unauthorized(request):
            return failed
        body = json.loads(await request.body())
        if failed := await self._failed(body, *body["input"]):
            return failed
        if self.vectors:
            return Response(self.vectors, headers={"content-type": "application/json"})
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


_MALFORMED = {
    "page": (b"<html>Log in</html>", "text/html"),
    "login": (b"<html>Log in</html>", "application/json"),
    "half": (b'{"id": "x", "cho', "application/json"),
    "null": (b"null", "application/json"),
    "error": (b'{"error": {"message": "upstream is down"}}', "application/json"),
}
"""Responses with the status of success, as of proxies, by the first word of the prompt."""


def _unauthorized(request):
    given = request.headers
    # Versions of Anthropic's client differ in the header of the key.
    if KEY in (given.get("x-api-key"), given.get("authorization", "").removeprefix("Bearer ")):
        return None
    return _error("Incorrect API key provided", 401)


def _error(message, status, headers=None):
    """An error in the form that both APIs have in common."""
    from starlette.responses import JSONResponse

    error = {"type": "error", "error": {"type": "some_error", "message": message}}
    return JSONResponse(error, status, headers)


def _completion(body, kind, choice, prompt, text):
    tokens, words = len(prompt.split()), len(text.split())
    return {
        "id": "1",
        "object": kind,
        "created": 0,
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": tokens,
            "completion_tokens": words,
            "total_tokens": tokens + words,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@contextlib.contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    """Yield the server and its base URL for OpenAI's API; Anthropic's is without the ``/v1``."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.routing import Route

    server = Server()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/messages", server.messages, methods=["POST"]),
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
