"""Turns of the calls in a worker: side by side, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets calls run side by side, or one alone, about in the order in which they come."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._ended = threading.Condition()
        self._running = 0

    @contextmanager
    def take(self, alone: bool = False) -> Iterator[None]:
        """Wait for a turn, and hold it. Later calls wait for one alone while it waits, too."""
        if alone:
            with self._door:
                with self._ended:
                    self._ended.wait_for(lambda: not self._running)
                yield
            return
        with self._door, self._ended:
            self._running += 1
        try:
            yield
        finally:
            with self._ended:
                self._running -= 1
                self._ended.notify()
