"""Whether a model is dead while its process lives: by its own word, and by what it raises."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vane_dagster.commit.transient import class_names
from vane_dagster.execute.attempts import is_out_of_memory

PROBE = "check_health"
"""The method by which a model says, by raising, that it is dead; named as in Ray Serve."""
_EVERY_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
TIMED_OUT_STATUS = 87
"""The exit code of a worker whose call took too long."""

_DEAD = frozenset({"EngineDeadError", "AcceleratorError", "DeviceLostError", "BrokenProcessPool"})
_DEAD_TEXTS = ("CUDA error:", "HIP error:", "device-side assert", "NCCL error")


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Ends this process if what is done within takes longer: nothing else stops a call that hangs.

    The run finds its worker dead then, and halves the rows that it was at.
    """
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, os._exit, (TIMED_OUT_STATUS,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class SickError(Exception):
    """A model is dead while its process lives.

    Attributes:
        cause: What it raised.
        rows: Whether rows were at work, so that they may be the reason.
    """

    def __init__(self, cause: BaseException, rows: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause
        self.rows = rows


def is_dead(error: BaseException) -> bool:
    """Whether an error says that an engine or a device is lost to the process that raises it.

    After an illegal access or a failed assertion of a kernel, each later call of CUDA in the
    process fails with the same error:
    https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, cudaError.
    """
    if is_out_of_memory(error):
        return False
    if class_names(error) & _DEAD:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _DEAD_TEXTS)


def worst(errors: Mapping[int, BaseException]) -> BaseException:
    """Of the errors of some rows, one by which a model is dead, else any."""
    found = [*errors.values()] or [ValueError("no row failed")]
    return next((error for error in found if is_dead(error)), found[0])


class Health:
    """Asks a model how it is, where it has a method for that.

    Args:
        target: The model.
        loop: Where its coroutines run.
    """

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        found = getattr(target, PROBE, None)
        self._probe: Callable[[], Any] | None = found if callable(found) else None
        self._loop = loop
        self._asked = time.monotonic()

    def check(self, now_and_then: bool = False) -> None:
        """Asks it before it is given rows.

        Args:
            now_and_then: Whether to do nothing if it was asked in the last ten seconds.

        Raises:
            SickError: If it is dead.
        """
        if self._probe is None or (
            now_and_then and time.monotonic() - self._asked < _EVERY_SECONDS
        ):
            return
        try:
            with deadline(_ANSWER_SECONDS):
                answer = self._probe()
                if inspect.isawaitable(answer):
                    waiting = _awaited(answer)
                    if self._loop is None:
                        asyncio.run(waiting)
                    else:
                        asyncio.run_coroutine_threadsafe(waiting, self._loop).result()
        except Exception as error:
            raise SickError(error, rows=False) from error
        self._asked = time.monotonic()

    def judge(self, error: BaseException) -> None:
        """Tells an error of the rows from that of a dead model.

        Raises:
            SickError: If the model is dead.
        """
        if is_dead(error):
            raise SickError(error, rows=True)
        try:
            self.check()
        except SickError as sick:
            raise SickError(sick.cause, rows=True) from error

    async def judge_later(self, error: BaseException) -> None:
        """As `judge`, in the model's own loop."""
        if is_dead(error):
            raise SickError(error, rows=True)
        try:
            answer = self._probe() if self._probe is not None else None
            if inspect.isawaitable(answer):
                await asyncio.wait_for(answer, _ANSWER_SECONDS)
        except Exception as cause:
            raise SickError(cause, rows=True) from error


async def _awaited(answer: Any) -> Any:
    return await answer
