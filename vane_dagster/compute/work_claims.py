"""Work claims: runs on one cluster agree on who computes what, to avoid duplicate work.

The table is pure state with the time passed in; the pool manager holds it, and drivers reach it
through `Claims`. A claim only saves work. Parts are named by their content and never overwritten,
so the result is correct even if two runs compute a partition, for example after a pool manager
crash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MAX_RELEASED = 300_000
"""Names whose last release the table keeps; the oldest are dropped first."""
_MARGIN_SECONDS = 30.0  # allows for the time that the request took


@dataclass(frozen=True)
class ClaimRequest:
    """One call of a claim holder.

    Attributes:
        holder: Identifies the holder.
        run_id: Its run.
        ttl_seconds: Seconds without a call after which its claims expire.
        wanted: Groups of names of work. A group is claimed as a whole or not at all.
        release: Names to release first.
        age: Seconds since the holder listed the store.
    """

    holder: str
    run_id: str
    ttl_seconds: float
    wanted: Sequence[Sequence[str]] = ()
    release: Sequence[str] = ()
    age: float = 0.0


@dataclass(frozen=True)
class ClaimAnswer:
    """The answer to a claim on a group of names.

    Attributes:
        held_by: The run that has claimed a name of the group; empty if the claim was granted.
        is_changed: Whether another run released a name after the holder listed the store, so that
            there may be new parts.
    """

    held_by: str = ""
    is_changed: bool = False


class Claims:
    """Claims of one run. Thread-safe. Here no other run shares the workers: all are granted."""

    def ask(
        self, wanted: Sequence[Sequence[str]], release: Sequence[str] = (), age: float = 0.0
    ) -> Sequence[ClaimAnswer]:
        """Release names, then claim each group without names of other runs. Does not wait."""
        return [ClaimAnswer()] * len(wanted)

    def close(self) -> None:
        """Release everything."""


class ClaimTable:
    """All claims on a cluster. Not thread-safe: the pool manager has one thread."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[ClaimRequest, float]] = {}  # of each holder
        self._held: dict[str, str] = {}  # the holder of each name
        self._released: dict[str, float] = {}  # ordered by the last release

    def ask(self, request: ClaimRequest, now: float) -> list[ClaimAnswer]:
        """Release and claim names. A repeated request gets the same answer."""
        id = request.holder
        self._latest[id] = request, now
        self._release(id, request.release, now)
        since = now - request.age - _MARGIN_SECONDS
        return [self._claim(id, names, since) for names in request.wanted]

    def end(self, holder: str, now: float) -> None:
        """Release all claims of a holder."""
        self._release(holder, list(self._held), now)
        self._latest.pop(holder, None)

    def expire(self, now: float) -> None:
        """End the holders without a call for longer than `ttl_seconds`."""
        for holder, (request, seen) in list(self._latest.items()):
            if now - seen > request.ttl_seconds:
                self.end(holder, now)

    def _claim(self, id: str, names: Sequence[str], since: float) -> ClaimAnswer:
        for name in names:
            if (other := self._held.get(name, id)) != id:
                return ClaimAnswer(self._latest[other][0].run_id)
        self._held.update(dict.fromkeys(names, id))
        last = max((self._released.get(name, -math.inf) for name in names), default=-math.inf)
        return ClaimAnswer(is_changed=last >= since)

    def _release(self, id: str, names: Iterable[str], now: float) -> None:
        for name in names:
            if self._held.get(name) == id:
                del self._held[name]
                self._released.pop(name, None)
                self._released[name] = now
        while len(self._released) > _MAX_RELEASED:
            del self._released[next(iter(self._released))]
