"""The batch size of a worker: declared by the stage, limited by memory, or measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Literal

import pyarrow as pa

from vane_dagster.pipeline.options import AUTO

_FIRST_ROWS = 16
_MAX_ROWS = 65_536
_TRIALS = 3
_WORTH = 1.1


class BatchSizer:
    """The batch sizes that a worker has learned, kept while the worker and its pool live.

    The search doubles the size as long as throughput rises by a tenth. Throughput is the median of
    three batches of exactly that size.

    Attributes:
        fits: Rows of the largest batch that is expected to fit into memory; None without a limit.
    """

    def __init__(self) -> None:
        self.fits: int | None = None
        self._size = _FIRST_ROWS
        self._best: tuple[float, int] = (0.0, _FIRST_ROWS)
        self._rates: list[float] = []
        self._is_settled = False

    def of(self, asked: int | Literal["auto"] | None, rows: int) -> int:
        """Return the size of the next batch, in rows."""
        size = self._size if asked == AUTO else asked or rows
        return max(1, min(size, self.fits or size, rows))

    def cut(self, table: pa.Table, asked: int | Literal["auto"] | None) -> Iterator[pa.Table]:
        """Cut a table into batches, each of the best size known at that time."""
        start = 0
        while start < table.num_rows:
            size = self.of(asked, table.num_rows - start)
            yield table.slice(start, size)
            start += size

    def learn(self, rows: int, seconds: float) -> None:
        """Record how long a batch took."""
        if self._is_settled or rows != self._size or seconds <= 0:
            return
        self._rates.append(rows / seconds)
        if len(self._rates) < _TRIALS:
            return
        rate, self._rates = statistics.median(self._rates), []
        larger = 2 * self._size
        if rate < self._best[0] * _WORTH:
            self._size, self._is_settled = self._best[1], True
        elif larger > min(self.fits or _MAX_ROWS, _MAX_ROWS):
            self._best, self._is_settled = (rate, self._size), True
        else:
            self._best, self._size = (rate, self._size), larger

    def limit(self, fits: int | None) -> None:
        """Record the batch size that fit after a larger one did not; None changes nothing."""
        if fits is not None:
            self.fits = min(fits, self.fits or fits)
            if self._size > self.fits:
                self._size, self._is_settled = min(self._best[1], self.fits), True

    def used(self, asked: int | Literal["auto"] | None) -> int | None:
        """Return the size to report, measured or limited by memory; None if it is neither."""
        return self._size if asked == AUTO and self._is_settled else self.fits
