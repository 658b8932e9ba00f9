"""Admission of fragments by measured bytes, which bounds memory for any input."""

from __future__ import annotations

import math

from vane_dagster.engine.fragment_state import FragmentState

_MIN_EXPANSION = 3.0
_UNKNOWN_EXPANSION = 32.0
_MIN_SOURCE_BYTES = 1 << 20


class MemoryBudget:
    """Bytes that the fragments in progress may hold in shared memory, all stages together.

    A fragment is charged its source bytes times the largest expansion measured so far: the maximum
    bytes that a fragment held at one time, divided by its source bytes. Every report updates it, so
    a fragment that outgrows the estimate stops admission while it is in progress. Until the first
    fragment has completed, a large expansion is assumed.

    Fragments admitted in error are held back: if memory is too short for all to grow, only the
    oldest continue, and the first always does.

    Attributes:
        fragments: Those in progress, by their place.
    """

    def __init__(self, limit: int, fragments: int) -> None:
        """Admit fragments within the limits, and always at least one."""
        self._limit = limit
        self._most = fragments
        self._expansion = _MIN_EXPANSION
        self.fragments: dict[tuple[int, int], FragmentState] = {}
        self._is_measured = False
        self._source_bytes = 0  # of all fragments in progress

    @property
    def _charged_expansion(self) -> float:
        return max(self._expansion, 0.0 if self._is_measured else _UNKNOWN_EXPANSION)

    def has_room_for(self, fragment: FragmentState) -> bool:
        """Whether there is room for a fragment."""
        if not self.fragments:
            return True
        wanted = (self._source_bytes + _source(fragment)) * self._charged_expansion
        return len(self.fragments) < self._most and wanted <= self._limit

    def charge(self, fragment: FragmentState) -> None:
        """Charge a new fragment."""
        self.fragments[fragment.place] = fragment
        self._source_bytes += _source(fragment)

    def record_table(self, fragment: FragmentState, table_bytes: int) -> None:
        """Update the expansion from the bytes that a fragment holds, and those of a new table."""
        self._expansion = max(self._expansion, (fragment.held + table_bytes) / _source(fragment))

    def last_to_continue(self) -> tuple[float, float]:
        """The last place of a fragment that may continue: it and earlier ones have room to grow."""
        expansion = self._charged_expansion
        if self._source_bytes * expansion <= self._limit:
            return math.inf, 0
        fragments = [self.fragments[place] for place in sorted(self.fragments)]
        last, held = fragments[0], float(sum(each.held for each in fragments))
        for fragment in fragments:
            held += max(0.0, _source(fragment) * expansion - fragment.held)
            if held > self._limit:
                break
            last = fragment
        return last.place

    def release(self, fragment: FragmentState) -> None:
        """Release a fragment's bytes."""
        del self.fragments[fragment.place]
        self._source_bytes -= _source(fragment)
        self._is_measured |= bool(fragment.task_states)


def _source(fragment: FragmentState) -> int:
    return max(fragment.record.bytes, fragment.bytes_read, _MIN_SOURCE_BYTES)
