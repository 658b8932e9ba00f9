"""A server with OpenAI's API that misbehaves on request; run as a process of its own.

It echoes: the answer to "a" is "echo: a", and the embedding of a text is its length, repeated as
the request's `dimensions` says (4). It serves ``/v1/chat/completions``, ``/v1/completions``,
``/v1/embeddings``, ``/v1/models``, ``/health`` and ``/metrics`` with the gauge
``server_requests_in_flight``. Answers have the process id as `system_fingerprint`.

Start it by its path, or with ``tests`` on the path of modules::

    python tests/support/misbehaving_server.py --port 8000
    python -m support.misbehaving_server --port {port} --host {host} --requests /tmp/requests

Its options are described by ``--help``. Words in a prompt make it fail at that request:

=========  ========================================================================
word       what the server does
=========  ========================================================================
poison     ends itself by SIGKILL, without an answer
exit       ends itself with code 3, without an answer
hang       stops to answer anything, ``/health`` too; it ignores SIGTERM
stall      never answers this request; others are answered
broken     answers with status 500
busy       answers with status 429
refused    answers with status 400
half       answers with half of a response, and closes the connection
slow       answers after a second
=========  ========================================================================

With ``-once`` appended, as in "a poison-once", a word works only at the first request with that
prompt, also across restarts if there is a file of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

WORDS = ("poison", "exit", "hang", "stall", "broken", "busy", "refused", "half", "slow")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="A server with OpenAI's API that misbehaves.")
    add = made.add_argument
    add("--port", type=int, required=True)
    add("--host", default="127.0.0.1")
    add("--key-env", help="environment variable with the bearer token that requests must have")
    add("--model", default="echo", help="name of the model")
    add("--requests", help="file that gets the prompt of each request as a JSON string a line")
    add("--starts", help="file that gets the process id a line at each start")
    add("--children", help="file that gets the process ids of the child processes a line")
    add("--start-seconds", type=float, default=0.0, help="time before the port is open")
    add("--warm-up-seconds", type=float, default=0.0, help="time in which /health answers 503")
    add("--seconds", type=float, default=0.0, help="time that each answer takes")
    add("--crash-at-start", type=int, default=0, help="starts that end with code 3; needs --starts")
    add("--exit-after", type=int, help="requests answered before the server ends with code 3")
    add("--hang-after", type=int, help="requests answered before the server hangs")
    add("--leak-mb", type=int, default=0, help="MiB that each request leaks")
    add("--leak-children", type=int, default=0, help="child processes with sessions of their own")
    add("--shared-memory", help="file that gets the name of a shared block a line")
    add("--ignore-sigterm", action="store_true", help="never end by SIGTERM")
    add("--access-log", action="store_true", help="print a line for each request")
    return made


class MisbehavingServer:
    """The application.

    Args:
        options: The command line's options.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._key = os.environ[options.key_env] if options.key_env else ""
        self._began = time.monotonic()
        self._in_flight = self._answered = 0
        self._leaked: list[bytearray] = []
        self._seen: Counter[str] = Counter()
        if options.requests and Path(options.requests).exists():
            self._seen.update(requests(options.requests))
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        warm = time.monotonic() - self._began >= self._options.warm_up_seconds
        return Response(status_code=200 if warm else 503)

    async def metrics(self, request: Request) -> Response:
        lines = (
            "# HELP server_requests_in_flight Requests in flight.",
            "# TYPE server_requests_in_flight gauge",
            f'server_requests_in_flight{{model="{self._options.model}"}} {self._in_flight}.0',
        )
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(self, request: Request) -> Response:
        model = {"id": self._options.model, "object": "model", "created": 0, "owned_by": "tests"}
        return self._refused(request) or JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        prompt = _text(body["messages"][-1]["content"])
        if failed := await self._failed(request, prompt):
            return failed
        message = {"role": "assistant", "content": f"echo: {prompt}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return JSONResponse(self._completion(body, "chat.completion", [choice], [prompt]))

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        if failed := await self._failed(request, *prompts):
            return failed
        choices = [
            {"index": i, "finish_reason": "stop", "text": f"echo: {prompt}", "logprobs": None}
            for i, prompt in enumerate(prompts)
        ]
        return JSONResponse(self._completion(body, "text_completion", choices, prompts))

    async def embeddings(self, request: Request) -> Response:
        body = await request.json()
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        if failed := await self._failed(request, *texts):
            return failed
        size = body.get("dimensions", 4)
        data = [
            {"object": "embedding", "index": i, "embedding": [float(len(text))] * size}
            for i, text in enumerate(texts)
        ]
        used = sum(len(text.split()) for text in texts)
        usage = {"prompt_tokens": used, "total_tokens": used}
        return JSONResponse(
            {"object": "list", "model": self._options.model, "data": data, "usage": usage}
        )

    def _completion(self, body: dict, kind: str, choices: list, prompts: list[str]) -> dict:
        tokens = sum(len(prompt.split()) for prompt in prompts)
        return {
            "id": "1",
            "object": kind,
            "created": 0,
            "model": body.get("model", self._options.model),
            "choices": choices,
            "system_fingerprint": str(os.getpid()),
            "usage": {
                "prompt_tokens": tokens,
                "completion_tokens": tokens + len(prompts),
                "total_tokens": 2 * tokens + len(prompts),
            },
        }

    def _refused(self, request: Request) -> Response | None:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return _error("Incorrect API key provided", 401)
        return None

    async def _failed(self, request: Request, *prompts: str) -> Response | None:
        """Record a request, and fail as its words or the options say; None for an answer."""
        if refused := self._refused(request):
            return refused
        self._in_flight += 1
        try:
            words = [word for prompt in prompts for word in self._words(prompt)]
            self._record(prompts)
            if self._options.leak_mb:
                self._leaked.append(bytearray(os.urandom(4096) * (self._options.leak_mb * 256)))
            await asyncio.sleep(self._options.seconds + ("slow" in words))
            self._crash_or_hang(words)
            if "stall" in words:
                await asyncio.sleep(1e6)
        finally:
            self._in_flight -= 1
        if "half" in words:
            return Response(b'{"id": "x", "cho', headers={"content-length": "500"})
        for word, status in (("broken", 500), ("busy", 429), ("refused", 400)):
            if word in words:
                return _error(word, status)
        return None

    def _words(self, prompt: str) -> list[str]:
        """The words of a prompt that make this request fail."""
        is_first = self._seen[prompt] == 0
        given = prompt.split()
        return [w for w in WORDS if w in given or (is_first and f"{w}-once" in given)]

    def _record(self, prompts: tuple[str, ...]) -> None:
        self._seen.update(prompts)
        if self._options.requests:
            for prompt in prompts:
                append(self._options.requests, json.dumps(prompt))

    def _crash_or_hang(self, words: list[str]) -> None:
        answered, options = self._answered, self._options
        self._answered += 1
        if "poison" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if "exit" in words or (options.exit_after is not None and answered >= options.exit_after):
            print("the server ends itself", flush=True)
            os._exit(3)
        if "hang" in words or (options.hang_after is not None and answered >= options.hang_after):
            while True:
                time.sleep(1e6)


class _Server(uvicorn.Server):
    """Does not end by SIGTERM if it is so configured."""

    ignores = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.ignores:
            super().handle_exit(sig, frame)


def append(path: str, line: str) -> None:
    """Append a line to a file, whole whichever processes append to it too."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def requests(path: str | Path) -> list[str]:
    """The prompts in a file of requests, in the order of their arrival."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _text(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "") for part in content)


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "type": "some_error"}}, status)


def main() -> None:
    options = parser().parse_args()
    starts = 0
    if options.starts:
        append(options.starts, str(os.getpid()))
        starts = len(Path(options.starts).read_text().splitlines())
    print(f"the server starts on port {options.port}")
    for _ in range(options.leak_children):
        child = subprocess.Popen(["sleep", "1000000"], start_new_session=True)
        if options.children:
            append(options.children, str(child.pid))
    if options.shared_memory:
        block = SharedMemory(create=True, size=2**20)
        append(options.shared_memory, block.name)
        # It holds the pipe by which the resource tracker knows who still uses the block.
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,)).start()
    if starts and starts <= options.crash_at_start:
        print(f"cannot load the model at start {starts}", file=sys.stderr)
        sys.exit(3)
    time.sleep(options.start_seconds)
    level = "info" if options.access_log else "warning"
    app = MisbehavingServer(options).app
    server = _Server(uvicorn.Config(app, host=options.host, port=options.port, log_level=level))
    server.ignores = options.ignore_sigterm
    server.run()


if __name__ == "__main__":
    main()
