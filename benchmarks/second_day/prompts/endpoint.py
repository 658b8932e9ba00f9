"""An endpoint of OpenAI's chat API: its answers are numbers that depend on the prompt alone.

``python -m benchmarks.second_day.prompts.endpoint FOLDER`` prints its port. It leaves in the folder
what it was asked: a line for each call, and one for the tokens of each that it answered. A poisoned
text is refused. If the folder has a file `kill`, the next process that asks is killed, unanswered.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import zlib
from pathlib import Path

import psutil
from aiohttp import web

from benchmarks.second_day.embedder import POISON

URL = "SECOND_DAY_URL"
MODEL = "gpt-4o-mini"
ANSWER_TOKENS = 20
SECONDS = 0.02
"""From a request to its answer."""
PRICES = (0.15, 0.60)
"""Dollars a million tokens, of prompts and of answers."""


def number(prompt: str) -> int:
    """Return the number that answers a prompt; a float of 32 bits holds it."""
    return zlib.crc32(prompt.encode()) % 9_999_991


class Endpoint:
    """Answers requests, and counts them in a folder."""

    def __init__(self, state: Path) -> None:
        """Keep the folder."""
        self.state = state

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        given = json.loads(await request.read())
        prompt = _text(given["messages"][-1]["content"])
        self._add("calls", "1")
        try:
            (self.state / "kill").unlink()
        except FileNotFoundError:
            pass
        else:
            os.kill(_asking(request), signal.SIGKILL)
        await asyncio.sleep(SECONDS)
        if POISON in prompt:
            error = {"message": "this text cannot be answered", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        tokens = len(prompt.split())
        self._add("tokens", f"{tokens} {ANSWER_TOKENS}")
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL,
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": str(number(prompt))},
                    }
                ],
                "usage": {
                    "prompt_tokens": tokens,
                    "completion_tokens": ANSWER_TOKENS,
                    "total_tokens": tokens + ANSWER_TOKENS,
                },
            }
        )

    def _add(self, name: str, line: str) -> None:
        with (self.state / name).open("a") as file:
            print(line, file=file)


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _asking(request: web.Request) -> int:
    """Return the process at the other end of a request's connection."""
    assert request.transport is not None
    port = request.transport.get_extra_info("peername")[1]
    for connection in psutil.net_connections("tcp4"):
        if connection.laddr and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise RuntimeError(f"no process has port {port}")


async def main(state: Path) -> None:
    """Serve until the process is killed."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", Endpoint(state).answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
