"""Rate limits per minute, as endpoints define them: for requests, and for tokens."""

from __future__ import annotations

import asyncio
import time

_MINUTE = 60.0
_RECENT = 10


class RateLimiter:
    """Limits a rate per minute, spread evenly; for one event loop.

    Attributes:
        workers: The number of workers that share the limit evenly.
        typical: Average of recent amounts; at first a guess.
    """

    def __init__(self, per_minute: float | None, typical: float = 1.0) -> None:
        self._seconds = _MINUTE / per_minute if per_minute else 0.0
        self._next = 0.0
        self._turn = asyncio.Lock()
        self._learned = 0
        self.workers = 1
        self.typical = typical

    async def take(self) -> float:
        """Wait until the rate allows a typical amount, and return it. One waits at a time."""
        if not self._seconds:
            return self.typical
        async with self._turn:
            now = time.monotonic()
            self._next = max(self._next, now)
            await asyncio.sleep(self._next - now)
            self._next += self.typical * self._seconds * self.workers
            return self.typical

    def learn(self, taken: float, amount: float) -> None:
        """Record the actual amount of a request in place of the taken one; 0 if unknown."""
        if not amount:
            return
        self._next += (amount - taken) * self._seconds * self.workers
        self._learned = min(self._learned + 1, _RECENT)
        self.typical += (amount - self.typical) / self._learned
