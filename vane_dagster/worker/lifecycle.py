"""The lifecycle of a worker: the progress of its model's construction, and its replacement."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vane_dagster._secrets import masked
from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.worker.reports import WorkerStatus
from vane_dagster.worker.watchdog import deadline

_GRACE_SECONDS = 60.0


class Startup:
    """The construction that a worker may be running. There is at most one."""

    def __init__(self) -> None:
        self._began = 0.0
        self._thread: int | None = None

    @contextmanager
    def watched(self, limit: float) -> Iterator[None]:
        """Track a construction in this thread.

        After `limit` seconds the driver asks for its state and ends the worker. If native code
        never lets another thread answer, the process is ended a minute later, and its stack is
        printed to its standard error.
        """
        self._began, self._thread = time.monotonic(), threading.get_ident()
        try:
            with deadline(limit + _GRACE_SECONDS):
                yield
        finally:
            self._thread = None

    def status(self) -> WorkerStatus:
        """Return the state of the construction. Called from another thread."""
        thread, began = self._thread, self._began
        frame = sys._current_frames().get(thread) if thread is not None else None
        if frame is None:
            return WorkerStatus()
        stack = "".join(traceback.format_stack(frame))
        return WorkerStatus(time.monotonic() - began, masked(stack))


def own_memory() -> int:
    """Return the bytes that this process and its child processes hold in memory.

    Mapped files and shared memory are left out where the system reports them: weights may be
    mapped, tables from other workers are shared, and neither is a leak.
    """
    import psutil

    this, held = psutil.Process(), 0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            memory = process.memory_info()
            held += int(memory.rss - getattr(memory, "shared", 0))
    return held


def recycle_reason(lifecycle: WorkerLifecycle, batches: int) -> str:
    """Return why a worker should be replaced by a fresh one; empty if it should not."""
    if lifecycle.max_batches is not None and batches >= lifecycle.max_batches:
        return f"has answered {batches} calls, max_batches={lifecycle.max_batches}"
    if lifecycle.max_rss is not None and (held := own_memory()) > lifecycle.max_rss:
        limit = lifecycle.max_rss / 2**20
        return f"holds {held / 2**20:.0f} MiB of memory, max_rss={limit:.0f} MiB"
    return ""
