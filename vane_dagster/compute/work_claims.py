"""Work claims: runs on one cluster agree on who computes a fragment, to avoid duplicate work.

The table is pure state with the time passed in; the pool manager holds it, and drivers reach it
through `Claims`. A claim only saves work. Parts are named by their content and never overwritten,
so the result is correct even if two runs compute a fragment, for example after a pool manager
crash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_MAX_SCOPES = 100_000
"""Partitions for which the table keeps the last release; the oldest are dropped first."""
_MARGIN_SECONDS = 30.0  # allows for the time that the request took


@dataclass(frozen=True)
class Group:
    """Keys that are claimed together or not at all.

    Attributes:
        scope: Partition of the keys, in a store and a pipeline.
        keys: Names of the pieces of work.
    """

    scope: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class ClaimRequest:
    """One call of a claim holder.

    Attributes:
        holder: Identifies the holder.
        run_id: Its run.
        ttl_seconds: Seconds without a call after which its claims expire.
        groups: Groups to claim.
        release: Keys to release first.
        ages: For scopes of `groups`, seconds since the holder last listed the parts in the store.
    """

    holder: str
    run_id: str
    ttl_seconds: float
    groups: Sequence[Group] = ()
    release: Sequence[bytes] = ()
    ages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClaimAnswer:
    """The answer to a `ClaimRequest`.

    Attributes:
        held_by: For each group, the run that holds one of its keys; empty if it was granted.
        changed: Scopes in which another holder has released claims since this one last listed
            their parts: there may be new parts.
    """

    held_by: Sequence[str]
    changed: Collection[str] = ()


def claim_key(scope: str, stage: str, work: str) -> bytes:
    """Identify a piece of work of a stage, such as a fragment by its key."""
    return hashlib.blake2b(f"{scope}|{stage}|{work}".encode(), digest_size=16).digest()


class Claims:
    """Claims of one run. Thread-safe. Here no other run shares the workers: all are granted."""

    def ask(
        self,
        groups: Sequence[Group],
        release: Sequence[bytes] = (),
        ages: Mapping[str, float] | None = None,
    ) -> ClaimAnswer:
        """Release keys, then claim each group in which nobody else holds a key. Does not wait."""
        return ClaimAnswer([""] * len(groups))

    def close(self) -> None:
        """Release everything."""


@dataclass
class _Holder:
    run_id: str
    ttl_seconds: float
    seen: float
    keys: dict[bytes, str] = field(default_factory=dict)


class ClaimTable:
    """All claims on a cluster. Not thread-safe: the pool manager has one thread."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._held: dict[bytes, str] = {}
        # By scope: when the two latest holders last released a key, which suffices to decide for
        # any holder when another one last did. Ordered by the last release.
        self._released: dict[str, dict[str, float]] = {}

    def ask(self, request: ClaimRequest, now: float) -> ClaimAnswer:
        """Release and claim keys. A repeated request gets the same answer."""
        holder = self._holders.setdefault(
            request.holder, _Holder(request.run_id, request.ttl_seconds, now)
        )
        holder.seen = now
        self._release(request.holder, request.release, now)
        held_by = [self._claim(request.holder, holder, group) for group in request.groups]
        changed = {
            scope
            for scope in {group.scope for group in request.groups}
            if self._changed(scope, request.holder, now - request.ages.get(scope, 0.0))
        }
        return ClaimAnswer(held_by, changed)

    def end(self, holder: str, now: float) -> None:
        """Release all claims of a holder."""
        if (ended := self._holders.get(holder)) is not None:
            self._release(holder, list(ended.keys), now)
            del self._holders[holder]

    def expire(self, now: float) -> None:
        """End the holders without a call for longer than `ttl_seconds`."""
        for holder in [i for i, h in self._holders.items() if now - h.seen > h.ttl_seconds]:
            self.end(holder, now)

    def _claim(self, id: str, holder: _Holder, group: Group) -> str:
        for key in group.keys:
            if (other := self._held.get(key, id)) != id:
                return self._holders[other].run_id
        for key in group.keys:
            self._held[key] = id
            holder.keys[key] = group.scope
        return ""

    def _release(self, id: str, keys: Sequence[bytes], now: float) -> None:
        holder = self._holders[id]
        for key in keys:
            if (scope := holder.keys.pop(key, None)) is None:
                continue
            del self._held[key]
            last = self._released.pop(scope, {})
            last.pop(id, None)
            self._released[scope] = {**dict(list(last.items())[-1:]), id: now}
        while len(self._released) > _MAX_SCOPES:
            del self._released[next(iter(self._released))]

    def _changed(self, scope: str, id: str, since: float) -> bool:
        released = self._released.get(scope, {})
        last = max((at for holder, at in released.items() if holder != id), default=-math.inf)
        return last >= since - _MARGIN_SECONDS
