"""Admission of fragments by measured bytes, so that memory stays bounded whatever comes in."""

from __future__ import annotations

_FIRST_EXPANSION = 3.0


class Budget:
    """Bytes that the fragments under way may take, all stages together.

    A fragment is charged once, with its bytes in the source times the largest expansion measured so
    far: the bytes of all tables that it became, over those of the source.
    """

    def __init__(self, limit: int, fragments: int) -> None:
        """Admits up to `limit` bytes and `fragments` fragments, and always one."""
        self._limit = limit
        self._most = fragments
        self._expansion = _FIRST_EXPANSION
        self._charged: dict[int, int] = {}

    def admits(self, source_bytes: int) -> bool:
        """Whether there is room for a fragment."""
        if not self._charged:
            return True
        charge = source_bytes * self._expansion
        room = self._limit - sum(self._charged.values())
        return len(self._charged) < self._most and charge <= room

    def charge(self, fragment: int, source_bytes: int) -> None:
        """Takes a fragment's bytes."""
        self._charged[fragment] = int(source_bytes * self._expansion)

    def release(self, fragment: int, source_bytes: int, held_bytes: int) -> None:
        """Gives them back, and learns from what the fragment became."""
        self._charged.pop(fragment, None)
        self._expansion = max(self._expansion, held_bytes / max(1, source_bytes))
