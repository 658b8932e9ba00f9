"""Progress of a run, in its log every few seconds and as bars in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from vane_dagster.execute.events import Progress

_LOG_SECONDS = 5.0


class ProgressReport:
    """Turns `Progress` events into lines of text, and bars where someone looks.

    Args:
        log: Takes a line.
        terminal: Whether to draw bars. Default: where standard error is a terminal.
    """

    def __init__(self, log: Callable[[str], None], terminal: bool | None = None) -> None:
        self._log = log
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._bars: dict[str, Any] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._said = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Reports, if it is time to."""
        for stage, done in progress.done.items():
            if done:
                self._first.setdefault(stage, (progress.seconds, done))
        if self._terminal:
            self._draw(progress)
        if time.monotonic() - self._said < _LOG_SECONDS:
            return
        self._said = time.monotonic()
        for line in describe(progress, self._first):
            self._log(line)

    def _draw(self, progress: Progress) -> None:
        from tqdm import tqdm

        for stage, total in progress.total.items():
            if stage not in self._bars:
                self._bars[stage] = tqdm(total=total, desc=stage, unit=" rows", unit_scale=True)
            bar = self._bars[stage]
            bar.update(progress.done[stage] - bar.n)

    def close(self) -> None:
        """Ends the bars."""
        for bar in self._bars.values():
            bar.close()


def describe(progress: Progress, first: Mapping[str, tuple[float, int]]) -> list[str]:
    """A line for each stage under way: rows done of all, rows a second, time left.

    Args:
        progress: How far the stages are.
        first: When each stage had its first rows behind it, and how many, so that the time in
            which its model was loaded does not count.
    """
    lines = []
    for stage, total in progress.total.items():
        done = progress.done[stage]
        if not 0 < done < total:
            continue
        since, then = first.get(stage, (progress.seconds, done))
        if progress.seconds > since and done > then:
            rate = (done - then) / (progress.seconds - since)
        else:
            rate = done / max(progress.seconds, 1e-9)
        left = time.strftime("%H:%M:%S", time.gmtime((total - done) / rate))
        lines.append(
            f"{stage}: {done:,} of {total:,} rows ({done / total:.0%}), {rate:,.0f} rows/s, "
            f"{left} left"
        )
    return lines
