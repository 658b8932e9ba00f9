"""Protection of the worker process from user code: its forks, files and asyncio tasks."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

NO_DESCRIPTORS_STATUS = 89
"""The exit code of a worker in which user code has used up the file descriptors."""
_SPARE_DESCRIPTORS = 8


@contextmanager
def one_process() -> Iterator[None]:
    """End a child process that user code forked in the body, when it leaves the body.

    Only the parent may continue: the child shares its connection and would answer a second time.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1)


def check_descriptors() -> None:
    """End this process if too few file descriptors are left to read and write tables.

    The driver then treats the rows like those of any worker that died.
    """
    spare: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            spare.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno == errno.EMFILE:
            os._exit(NO_DESCRIPTORS_STATUS)
    finally:
        for descriptor in spare:
            os.close(descriptor)


_running: ContextVar[asyncio.Task[Any] | None] = ContextVar("_running", default=None)
"""The task that runs user code in this context; None in the worker's own code."""


def protect_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Keep user code from cancelling the worker's tasks in a loop, for example by `all_tasks`."""
    loop.set_task_factory(_new_task)


def begin_user_code() -> None:
    """Mark the rest of the current task, and the tasks that it starts, as user code."""
    _running.set(asyncio.current_task())


def _new_task(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
    kind = _WorkerTask if _running.get() is None else asyncio.Task
    return kind(coro, loop=loop, **kwargs)


class _WorkerTask(asyncio.Task[Any]):
    """A task that only the worker and the user code inside it can cancel."""

    def cancel(self, msg: Any | None = None) -> bool:
        return _running.get() in (None, self) and super().cancel(msg=msg)
