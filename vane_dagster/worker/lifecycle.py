"""How long the construction of a model takes in a worker, and what it is at meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vane_dagster._secrets import masked
from vane_dagster.worker.protocol import Starting
from vane_dagster.worker.watchdog import deadline

_GRACE_SECONDS = 60.0


class Startup:
    """The one construction that a worker may be at."""

    def __init__(self) -> None:
        self._began = 0.0
        self._thread: int | None = None

    @contextmanager
    def watched(self, limit: float) -> Iterator[None]:
        """Takes note of a construction in this thread.

        The driver asks for it once it has taken `limit` seconds, and ends the worker. Where native
        code never lets another thread answer, the process is ended a minute later, and its stack
        is printed to its standard error.
        """
        self._began, self._thread = time.monotonic(), threading.get_ident()
        try:
            with deadline(limit + _GRACE_SECONDS):
                yield
        finally:
            self._thread = None

    def told(self) -> Starting:
        """What the construction is at; asked from another thread."""
        thread, began = self._thread, self._began
        frame = sys._current_frames().get(thread) if thread is not None else None
        if frame is None:
            return Starting()
        frames = traceback.extract_stack(frame)
        own = os.path.dirname(os.path.dirname(__file__))
        last = max((i for i, f in enumerate(frames) if f.filename.startswith(own)), default=-1)
        shown = traceback.format_list(frames[last + 1 :] or frames)
        return Starting(time.monotonic() - began, masked("".join(shown)))
