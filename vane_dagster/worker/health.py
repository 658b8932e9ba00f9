"""Whether a model is dead while its process lives: by its own word, and by what it raises."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from vane_dagster.errors import RowErrors
from vane_dagster.worker.frameworks import is_dead
from vane_dagster.worker.isolation import begin_user_code, one_process
from vane_dagster.worker.user_errors import contained, is_shutdown
from vane_dagster.worker.watchdog import deadline

PROBE = "check_health"
"""The method by which a model says, by raising, that it is dead; named as in Ray Serve."""
_EVERY_SECONDS = 10.0
_ANSWER_SECONDS = 30.0


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


def worst(error: BaseException) -> BaseException:
    """The error of a call; of errors of some rows, one by which a model is dead, else any."""
    if not isinstance(error, RowErrors) or not error.errors:
        return error
    found = [*error.errors.values()]
    return next((inner for inner in found if is_dead(inner)), found[0])


def check_alive(error: BaseException) -> None:
    """Raises SickError for an error of a call by which the model is dead."""
    if is_dead(error):
        raise SickError(error, rows=True)


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
            with deadline(_ANSWER_SECONDS), one_process():
                answer = self._probe()
                if inspect.isawaitable(answer):
                    waiting = _awaited(answer)
                    if self._loop is None:
                        asyncio.run(waiting)
                    else:
                        asyncio.run_coroutine_threadsafe(waiting, self._loop).result()
        except BaseException as error:
            if is_shutdown(error):
                raise
            raise SickError(contained(error), rows=False) from None
        self._asked = time.monotonic()

    def judge(self) -> None:
        """Asks it after a call has raised.

        Raises:
            SickError: If it is dead.
        """
        try:
            self.check()
        except SickError as sick:
            raise SickError(sick.cause, rows=True) from None

    async def judge_later(self) -> None:
        """As `judge`, in the model's own loop."""
        if self._probe is None:
            return
        asked = asyncio.ensure_future(self._probed(self._probe))
        try:
            await asyncio.wait([asked])
        finally:
            asked.cancel()
        cause = contained(asyncio.CancelledError()) if asked.cancelled() else asked.result()
        if cause is not None:
            raise SickError(cause, rows=True)

    async def _probed(self, probe: Callable[[], Any]) -> BaseException | None:
        """What a model raises when it is asked in its own loop."""
        begin_user_code()
        try:
            with deadline(_ANSWER_SECONDS), one_process():
                answer = probe()
                if inspect.isawaitable(answer):
                    await answer
        except BaseException as error:
            return contained(error)
        return None


async def _awaited(answer: Any) -> Any:
    begin_user_code()
    return await answer
