"""The event loop of a model's coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """An event loop in a thread of its own, started by the first coroutine that runs in it.

    All versions of a model's code share it, because the model's state may be bound to it.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result."""
        with self._lock:  # a worker has several slots, each with a thread
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop forever; asyncio stops it when a task of the user's raises SystemExit."""
    while not loop.is_closed():
        with contextlib.suppress(BaseException):
            loop.run_forever()
