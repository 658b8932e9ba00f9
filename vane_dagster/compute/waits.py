"""Reports of waits for other runs, without repetition."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from vane_dagster._dataclass import dataclass
from vane_dagster.events import Event, Waiting

_MIN_SECONDS = 10.0
_SHORT = 8


@dataclass
class _Wait:
    since: float
    event: Waiting | None = None


class Waits:
    """Emits `Waiting` when a wait begins, when its text changes, and when it ends.

    Two texts for one reason are at least ten seconds apart.
    """

    def __init__(
        self, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit, self._clock = emit, clock
        self._waits: dict[str, _Wait] = {}
        self._reported_at: dict[str, float] = {}

    def begin(self, reason: str, text: str, runs: Sequence[str] = (), after: float = 0.0) -> None:
        """Report that the run waits. Call this repeatedly while the wait lasts."""
        now = self._clock()
        wait = self._waits.setdefault(reason, _Wait(now))
        event = Waiting(text, tuple(runs))
        if now - wait.since < after or event == wait.event:
            return
        if now - self._reported_at.get(reason, -math.inf) >= _MIN_SECONDS:
            self._reported_at[reason], wait.event = now, event
            self._emit(event)

    def runs(self, reason: str) -> Sequence[str]:
        """Ids of the runs in the last text for a reason, while the wait lasts."""
        wait = self._waits.get(reason)
        return wait.event.runs if wait is not None and wait.event is not None else ()

    def end(self, reason: str, text: str) -> None:
        """Report that the run no longer waits; the duration is appended to the text."""
        wait = self._waits.pop(reason, None)
        if wait is not None and wait.event is not None:
            seconds = self._clock() - wait.since
            self._emit(Waiting(f"{text} ({seconds:.0f} s)", wait.event.runs))


def short(runs: Sequence[str]) -> str:
    """Runs by the first characters of their ids, as in Dagster's UI: "run 1a2b3c4d"."""
    shown = ", ".join(run[:_SHORT] for run in runs)
    return f"run{'s' * (len(runs) > 1)} {shown}"
