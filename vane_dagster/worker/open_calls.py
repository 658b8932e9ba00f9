"""The calls of user code that a worker waits for, described for the log of the run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from vane_dagster.errors import described

_LONG_SECONDS = 60.0
_MAX_SHOWN = 300


class OpenCalls:
    """Calls in flight, and rows that are called again. Any thread may describe them.

    Attributes:
        retried: The latest errors of the rows of each batch that are called again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.retried: dict[int, Sequence[BaseException]] = {}
        self._clock = clock
        self._open: dict[int, tuple[float, pa.ChunkedArray]] = {}
        self._numbers = itertools.count()
        self._longest = 0.0

    @contextmanager
    def one(self, ids: pa.ChunkedArray) -> Iterator[None]:
        """Count a call for the rows with some ids as in flight."""
        number, began = next(self._numbers), self._clock()
        self._open[number] = began, ids
        try:
            yield
        finally:
            del self._open[number]
            self._longest = max(self._longest, self._clock() - began)

    def describe(self) -> str:
        """Describe what a user may want to know of; empty if there is nothing.

        That is rows which are called again. Else it is the oldest call, once it has run for a
        minute and for twice as long as any call before it, and as when it was described last.
        """
        if errors := [*self.retried.values()]:
            rows, last = sum(map(len, errors)), described(errors[-1][-1])
            are = "row is" if rows == 1 else "rows are"
            return f"{rows:,} {are} being retried after errors, the last: {last[:_MAX_SHOWN]}"
        calls = [*self._open.values()]
        if not calls:
            return ""
        began, ids = min(calls, key=lambda call: call[0])
        seconds = self._clock() - began
        if seconds < max(_LONG_SECONDS, 2 * self._longest):
            return ""
        self._longest = seconds
        which = f"the {len(ids):,} rows from" if len(ids) > 1 else "row"
        return f"the call for {which} {ids[0].as_py()!r} has run for {seconds:,.0f} s"
