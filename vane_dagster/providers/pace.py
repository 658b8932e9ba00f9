"""Limits by the minute, as endpoints set them: of requests, and of tokens."""

from __future__ import annotations

import asyncio
import time

_MINUTE = 60.0
_FIRST_TOKENS = 500.0


class RateLimiter:
    """Lets through so much a minute, evenly; for one event loop.

    Args:
        per_minute: How much, of all workers together; None for no limit.

    Attributes:
        workers: Workers that share it, each evenly.
        typical: What one took of late; to be taken before it is known.
    """

    def __init__(self, per_minute: float | None) -> None:
        self._seconds = _MINUTE / per_minute if per_minute else 0.0
        self._next = 0.0
        self.workers = 1
        self.typical = _FIRST_TOKENS

    async def take(self, amount: float) -> None:
        """Waits until so much may go through."""
        if not self._seconds:
            return
        now = time.monotonic()
        begins = max(now, self._next)
        self._next = begins + amount * self._seconds * self.workers
        if begins > now:
            await asyncio.sleep(begins - now)

    def learn(self, amount: float) -> None:
        """Takes in what one took in fact, and settles the difference."""
        if self._seconds:
            self._next += (amount - self.typical) * self._seconds * self.workers
        self.typical += 0.1 * (amount - self.typical)
