"""A worker's life: how the construction of its model goes, and when a fresh worker is due."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vane_dagster._secrets import masked
from vane_dagster.pipeline.options import Upkeep
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


def own_memory() -> int:
    """Bytes that this process and those that it has started hold in memory.

    Without mapped files and shared memory, where the system tells them apart: weights may be the
    first, tables from other workers are the second, and neither is a leak.
    """
    import psutil

    this = psutil.Process()
    return sum(_own(process) for process in (this, *this.children(recursive=True)))


def _own(process: Any) -> int:
    import psutil

    try:
        found = process.memory_info()
    except psutil.Error:  # it has ended
        return 0
    return int(found.rss - getattr(found, "shared", 0))


def spent(upkeep: Upkeep, batches: int) -> str:
    """Why a worker is to be replaced by a fresh one; empty if it is not.

    Args:
        upkeep: What its stage asks for.
        batches: Calls that it has answered.
    """
    if upkeep.max_batches is not None and batches >= upkeep.max_batches:
        return f"has answered {batches} calls, max_batches_per_actor={upkeep.max_batches}"
    if upkeep.max_rss is not None and (held := own_memory()) > upkeep.max_rss:
        return f"holds {in_gib(held)} of memory, max_rss={in_gib(upkeep.max_rss)}"
    return ""


def in_gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
