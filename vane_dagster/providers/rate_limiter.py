"""Rate limits per minute, as endpoints define them: for requests, and for tokens."""

from __future__ import annotations

import asyncio
import time

_MINUTE = 60.0
_FIRST_TOKENS = 500.0


class RateLimiter:
    """Limits a rate per minute, spread evenly; for one event loop.

    Attributes:
        workers: The number of workers that share the limit evenly.
        typical: Moving average of recent amounts; take it if the amount is not yet known.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._seconds = _MINUTE / per_minute if per_minute else 0.0
        self._next = 0.0
        self.workers = 1
        self.typical = _FIRST_TOKENS

    async def take(self, amount: float) -> None:
        """Wait until the rate allows the amount."""
        if not self._seconds:
            return
        now = time.monotonic()
        begins = max(now, self._next)
        self._next = begins + amount * self._seconds * self.workers
        if begins <= now:
            return
        try:
            await asyncio.sleep(begins - now)
        except asyncio.CancelledError:
            self._next -= amount * self._seconds * self.workers
            raise

    def learn(self, amount: float) -> None:
        """Record the actual amount, and correct the difference from `typical`; 0 if unknown."""
        if not amount:
            return
        self._next += (amount - self.typical) * self._seconds * self.workers
        self.typical += 0.1 * (amount - self.typical)
