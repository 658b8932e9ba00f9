"""Says which other runs a run waits for, without repeating itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vane_dagster.events import Event, Waiting

_MIN_SECONDS = 10.0
_SHORT = 8


@dataclass
class _Wait:
    since: float
    event: Waiting | None = None


class Waits:
    """Emits `Waiting` when a wait begins, when its text changes, and when it ends.

    Between two texts for one reason lie ten seconds at least.

    Args:
        emit: Takes events.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit, self._clock = emit, clock
        self._waits: dict[str, _Wait] = {}
        self._told_at: dict[str, float] = {}

    def begin(self, reason: str, text: str, runs: Sequence[str] = (), after: float = 0.0) -> None:
        """States that the run waits; to be repeated as long as it does.

        Args:
            reason: See `Waiting`.
            text: See `Waiting`.
            runs: See `Waiting`.
            after: Seconds for which the wait must have lasted to be worth telling.
        """
        now = self._clock()
        wait = self._waits.setdefault(reason, _Wait(now))
        event = Waiting(reason, text, tuple(runs))
        if now - wait.since < after or event == wait.event:
            return
        if now - self._told_at.get(reason, -math.inf) >= _MIN_SECONDS:
            self._told_at[reason], wait.event = now, event
            self._emit(event)

    def runs(self, reason: str) -> Sequence[str]:
        """Ids of the runs that the last text for a reason named, while the wait lasts."""
        wait = self._waits.get(reason)
        return wait.event.runs if wait is not None and wait.event is not None else ()

    def end(self, reason: str, text: str) -> None:
        """States that the run does not wait, or no longer; how long it did follows the text."""
        wait = self._waits.pop(reason, None)
        if wait is not None and wait.event is not None:
            seconds = self._clock() - wait.since
            self._emit(Waiting(reason, f"{text} ({seconds:.0f} s)", wait.event.runs, over=True))


def short(runs: Sequence[str]) -> str:
    """Runs by the beginnings of their ids, as Dagster's UI shows them: "run 1a2b3c4d"."""
    shown = ", ".join(run[:_SHORT] for run in runs)
    return f"run{'s' * (len(runs) > 1)} {shown}"
