"""A server with OpenAI's API that misbehaves on request; run as a process of its own.

It echoes: the answer to "a" is "echo: a", with the process id as `system_fingerprint`. Its options
are described by ``--help``. Words in a prompt make it fail at that request:

=============  ========================================================================
word           what the server does
=============  ========================================================================
poison         ends itself by SIGKILL, without an answer
poison-once    the same, but only at the first request with that prompt
hang           stops to answer anything, ``/health`` too; it ignores SIGTERM
refused        answers with status 400
=============  ========================================================================
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
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
    add("--warm-up-seconds", type=float, default=0.0, help="time in which /health answers 503")
    add("--seconds", type=float, default=0.0, help="time that each answer takes")
    add("--exit-after", type=int, help="requests answered before the server ends with code 3")
    add("--leak-children", type=int, default=0, help="child processes with sessions of their own")
    add("--shared-memory", help="file that gets the name of a shared block a line")
    add("--ignore-sigterm", action="store_true", help="never end by SIGTERM")
    add("--access-log", action="store_true", help="print a line for each request")
    return made


class MisbehavingServer:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._key = os.environ[options.key_env] if options.key_env else ""
        self._began = time.monotonic()
        self._in_flight = self._answered = 0
        self._seen: Counter[str] = Counter()
        if options.requests and Path(options.requests).exists():
            self._seen.update(requests(options.requests))
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
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
        prompt = body["messages"][-1]["content"]
        if failed := await self._failed(request, prompt):
            return failed
        message = {"role": "assistant", "content": f"echo: {prompt}"}
        tokens = len(prompt.split())
        return JSONResponse(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": body.get("model", self._options.model),
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "system_fingerprint": str(os.getpid()),
                "usage": {
                    "prompt_tokens": tokens,
                    "completion_tokens": tokens + 1,
                    "total_tokens": 2 * tokens + 1,
                },
            }
        )

    def _refused(self, request: Request) -> Response | None:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return _error("Incorrect API key provided", 401)
        return None

    async def _failed(self, request: Request, prompt: str) -> Response | None:
        """Record a request, and fail as its words or the options say; None for an answer."""
        if refused := self._refused(request):
            return refused
        self._in_flight += 1
        try:
            words = prompt.split()
            is_poison = "poison" in words or ("poison-once" in words and not self._seen[prompt])
            self._seen.update([prompt])
            if self._options.requests:
                append(self._options.requests, json.dumps(prompt))
            await asyncio.sleep(self._options.seconds)
            answered, self._answered = self._answered, self._answered + 1
            if is_poison:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._options.exit_after is not None and answered >= self._options.exit_after:
                os._exit(3)
            while "hang" in words:
                time.sleep(1e6)
        finally:
            self._in_flight -= 1
        return _error("refused", 400) if "refused" in words else None


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
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "type": "some_error"}}, status)


def main() -> None:
    options = parser().parse_args()
    if options.starts:
        append(options.starts, str(os.getpid()))
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
    level = "info" if options.access_log else "warning"
    app = MisbehavingServer(options).app
    server = _Server(uvicorn.Config(app, host=options.host, port=options.port, log_level=level))
    server.ignores = options.ignore_sigterm
    server.run()


if __name__ == "__main__":
    main()
