"""Health checks of a model in a live process: by its own method, and by the errors it raises."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from vane_dagster._user_errors import contained, is_shutdown
from vane_dagster.errors import RowErrors, described
from vane_dagster.worker.event_loop import EventLoop
from vane_dagster.worker.frameworks import is_dead
from vane_dagster.worker.isolation import one_process
from vane_dagster.worker.watchdog import deadline

PROBE = "check_health"
"""The method of a model that raises if the model is dead; named as in Ray Serve."""
_EVERY_SECONDS = 10.0
_ANSWER_SECONDS = 30.0


class UnhealthyModelError(Exception):
    """A model is dead in a process that still runs.

    Attributes:
        cause: The error that the model raised.
        rows: Whether rows were being computed, and may be the reason.
    """

    def __init__(self, cause: BaseException, rows: bool) -> None:
        super().__init__(described(cause))
        self.cause = cause
        self.rows = rows


def check_alive(error: BaseException) -> None:
    """Raise UnhealthyModelError if an error of a call or of a row means that the model is dead."""
    errors = error.errors.values() if isinstance(error, RowErrors) else [error]
    if (fatal := next(filter(is_dead, errors), None)) is not None:
        raise UnhealthyModelError(fatal, rows=True)


class Health:
    """The health check of a model, if the model has a method for it."""

    def __init__(self, target: Any, events: EventLoop) -> None:
        probe = getattr(target, PROBE, None)
        self._probe: Callable[[], Any] | None = probe if callable(probe) else None
        self._events = events
        self._asked = time.monotonic()

    def check(self, now_and_then: bool = False, rows: bool = False) -> None:
        """Check the model before it gets rows, or after a call has raised."""
        if self._probe is None or (
            now_and_then and time.monotonic() - self._asked < _EVERY_SECONDS
        ):
            return
        try:
            with deadline(_ANSWER_SECONDS), one_process():
                answer = self._probe()
                if inspect.isawaitable(answer):
                    self._events.run(_awaited(answer))
        except BaseException as error:
            if is_shutdown(error):
                raise
            raise UnhealthyModelError(contained(error), rows) from None
        self._asked = time.monotonic()


async def _awaited(answer: Any) -> Any:
    return await answer
