"""A server that speaks OpenAI's API and Anthropic's, and fails in typical ways.

It refuses conversations in another form than the clients of these APIs publish.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from support.published_apis import check_chat, check_messages, said

KEY = "sk-a-key-of-the-tests"
_CHECKS = {"/v1/chat/completions": check_chat, "/v1/messages": check_messages}
_ONCE = {"busy": ("slow down", 429), "broken": ("oops", 500), "overloaded": ("Overloaded", 529)}
"""Errors of the first request whose prompt has a word."""
_MALFORMED = {
    "page": (b"<html>Log in</html>", "text/html"),
    "login": (b"<html>Log in</html>", "application/json"),
    "half": (b'{"id": "x", "cho', "application/json"),
    "null": (b"null", "application/json"),
    "error": (b'{"error": {"message": "upstream is down"}}', "application/json"),
}
"""Responses with the status of success, as of proxies, by the first word of the prompt."""


class Server:
    """Echoes prompts; some words in them make it fail."""

    def __init__(self) -> None:
        from support.batch_server import Batches

        self.batches = Batches(self)
        self.clear()

    def clear(self) -> None:
        self.batches.clear()
        self.requests: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.answers: dict[str, list[str]] = {}

    def route(self, path: str, answer: Callable[..., Any]) -> Route:
        """A path of an API, whose answer is made of the body and the prompt."""

        async def respond(request: Request) -> Response:
            given = request.headers
            # Versions of Anthropic's client differ in the header of the key.
            if KEY not in (given.get("x-api-key"), given.get("authorization", "")[7:]):
                return _error("Incorrect API key provided", 401)
            body = json.loads(await request.body())
            try:
                _CHECKS.get(path, bool)(body)
            except ValueError as error:
                return _error(f"not of the published API: {error}", 400)
            prompts = body.get("input") or [body.get("prompt") or _questions(body)[-1]]
            failed = self._failed(body, prompts)
            return failed or JSONResponse(answer(body, prompts[-1]))

        return Route(path, respond, methods=["POST"])

    def _failed(self, body: dict[str, Any], prompts: list[str]) -> Response | None:
        """Count a request, and return the response that a word in it asks for."""
        self.bodies.append(body)
        self.requests.update(prompts)
        first = {prompt: self.requests[prompt] == 1 for prompt in prompts}
        failures = (self._failure(prompt, first[prompt]) for prompt in prompts)
        return next(filter(None, failures), None)

    def _failure(self, prompt: str, first: bool) -> Response | None:
        for word, (message, status) in _ONCE.items():
            if word in prompt and first:
                return _error(message, status, {"Retry-After": "0.01"})
        if "cut" in prompt and first:
            return Response(b'{"id": "x", "cho', headers={"content-length": "500"})
        if (found := _MALFORMED.get(prompt.partition(" ")[0])) and first:
            return Response(found[0], media_type=found[1])
        if "refused" in prompt:
            return _error("content policy", 400)
        if "long" in prompt:
            return _error("This model's maximum context length is 10 tokens", 400)
        return None

    def _answer(self, questions: list[str], prompt: str) -> str:
        given = self.answers.get(questions[0])
        return given[min(len(questions), len(given)) - 1] if given else f"echo: {prompt}"

    def chat(self, body: dict[str, Any], prompt: str) -> Any:
        text = self._answer(_questions(body), prompt)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return _completion(body, choice, prompt, text)

    def messages(self, body: dict[str, Any], prompt: str) -> Any:
        """Anthropic's Messages API; with a tool, the answer is its input if it is JSON."""
        text = self._answer(_questions(body), prompt)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if body.get("tools"):
            with contextlib.suppress(ValueError):
                given, tool = json.loads(text), body["tools"][0]["name"]
                content = [{"type": "tool_use", "id": "t1", "name": tool, "input": given}]
        words = len(text.split())
        usage = {
            "input_tokens": len(prompt.split()),
            "cache_creation_input_tokens": 2,
            "cache_read_input_tokens": 1,
            "output_tokens": words,
        }
        reason = "max_tokens" if words > body["max_tokens"] else "end_turn"
        made = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"]}
        return {**made, "content": content, "stop_reason": reason, "usage": usage}

    def embeddings(self, body: dict[str, Any], prompt: str) -> Any:
        size = body.get("dimensions", 4)
        data = [
            {"object": "embedding", "index": i, "embedding": [float(len(text))] * size}
            for i, text in enumerate(body["input"])
        ]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        # The API does not guarantee the order of embeddings.
        return {"object": "list", "model": body["model"], "data": data[::-1], "usage": usage}


def _questions(body: dict[str, Any]) -> list[str]:
    return [said(m["content"]) for m in body["messages"] if m["role"] == "user"]


def _error(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """An error in the form that both APIs have in common."""
    error = {"type": "error", "error": {"type": "some_error", "message": message}}
    return JSONResponse(error, status, headers)


def _completion(body: dict[str, Any], choice: Any, prompt: str, text: str) -> Any:
    tokens, words = len(prompt.split()), len(text.split())
    usage = {
        "prompt_tokens": tokens,
        "completion_tokens": words,
        "total_tokens": tokens + words,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    made = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**made, "choices": [choice], "usage": usage}


@contextlib.contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    """Yield the server and its base URL for OpenAI's API; Anthropic's is without the ``/v1``."""
    import uvicorn

    server = Server()
    app = Starlette(
        routes=[
            server.route("/v1/chat/completions", server.chat),
            server.route("/v1/messages", server.messages),
            server.route("/v1/embeddings", server.embeddings),
            *server.batches.routes(),
        ]
    )
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    server.batches.url = f"http://127.0.0.1:{port}"
    yield server, f"{server.batches.url}/v1"
    running.should_exit = True
    thread.join()
