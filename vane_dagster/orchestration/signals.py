"""Deferred handling of the signals that end a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_deferred() -> Iterator[Sequence[int]]:
    """Handle the first SIGINT or SIGTERM after the block, and any further one at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def defer(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    handlers: dict[int, Any] = {number: signal.signal(number, defer) for number in _NUMBERS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])
