"""The event loop of a model's coroutines."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from vane_dagster.worker.event_loop import EventLoop


async def running() -> int:
    return id(asyncio.get_running_loop())


def test_threads_that_begin_together_share_one_loop():
    for _ in range(50):
        events, ready = EventLoop(), threading.Barrier(4)

        def begin(events: EventLoop = events, ready: threading.Barrier = ready) -> int:
            ready.wait()
            return events.run(running())

        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(begin) for _ in range(4)]
            assert len({each.result() for each in found}) == 1
