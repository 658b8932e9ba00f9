"""Deferred handling of the signals that end a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_deferred() -> Iterator[Sequence[Any]]:
    """Handle the first SIGINT or SIGTERM after the block, and any further one at once."""
    received: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def defer(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1:
            _handle(handlers[number], number, frame)

    handlers: dict[int, Any] = {number: signal.signal(number, defer) for number in _NUMBERS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        number, frame = received[0]
        _handle(handlers[number], number, frame)


def _handle(handler: Any, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, handler)
        signal.raise_signal(number)
