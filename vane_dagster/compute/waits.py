"""Reports of waits for other runs, without repetition."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from vane_dagster.events import Event, Noticed

_MIN_SECONDS = 10.0
_SHORT = 8


class Waits:
    """Emits a notice when a wait begins, when its text changes, and when it ends.

    Two texts for one reason are at least ten seconds apart.
    """

    def __init__(
        self, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit, self._clock = emit, clock
        self._since: dict[str, float] = {}
        self._said: dict[str, tuple[float, str]] = {}

    def begin(self, reason: str, text: str, after: float = 0.0) -> None:
        """Report that the run waits. Call this repeatedly while the wait lasts."""
        now, (at, said) = self._clock(), self._said.get(reason, (-math.inf, ""))
        is_due = now - self._since.setdefault(reason, now) >= after and now - at >= _MIN_SECONDS
        if is_due and text != said:
            self._said[reason] = now, text
            self._emit(Noticed(text, False))

    def end(self, reason: str, text: str) -> None:
        """Report that the run no longer waits; the duration is appended to the text."""
        at, said = self._said.get(reason, (0.0, ""))
        since = self._since.pop(reason, None)
        if since is not None and said:
            self._said[reason] = at, ""
            self._emit(Noticed(f"{text} ({self._clock() - since:.0f} s)", False))


def short(runs: Sequence[str]) -> str:
    """Runs by the first characters of their ids, as in Dagster's UI: "run 1a2b3c4d"."""
    shown = ", ".join(run[:_SHORT] for run in runs)
    return f"run{'s' * (len(runs) > 1)} {shown}"
