"""Admission of fragments by measured bytes, which bounds memory for any input."""

from __future__ import annotations

import math
from collections.abc import Iterable

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
        runs: The fragments in progress, by their place.
    """

    def __init__(self, limit: int, fragments: int) -> None:
        """Admit fragments within the limits, and always at least one."""
        self._limit = limit
        self._most = fragments
        self._expansion = _MIN_EXPANSION
        self.runs: dict[tuple[int, int], FragmentState] = {}
        self._is_measured = False
        self._charged = 0

    def has_room_for(self, run: FragmentState) -> bool:
        """Whether there is room for a fragment."""
        if not self.runs:
            return True
        wanted = self._charged + self._charge(run)
        return len(self.runs) < self._most and wanted <= self._limit

    def charge(self, run: FragmentState) -> None:
        """Charge a new fragment."""
        self.runs[run.place] = run
        self._recharge([run])

    def record_table(self, run: FragmentState, table_bytes: int) -> None:
        """Update the expansion from the bytes that a fragment holds, and those of a new table."""
        run.peak = max(run.peak, run.held + table_bytes)
        if (measured := run.peak / _source(run)) > self._expansion:
            self._expansion = measured
            self._recharge(self.runs.values())

    def last_to_continue(self) -> tuple[float, float]:
        """The last place of a fragment that may continue: it and earlier ones have room to grow."""
        if self._charged <= self._limit:
            return math.inf, 0
        places, held = sorted(self.runs), sum(run.held for run in self.runs.values())
        last = places[0]
        for place in places:
            held += max(0, self.runs[place].charge - self.runs[place].held)
            if held > self._limit:
                break
            last = place
        return last

    def release(self, run: FragmentState) -> None:
        """Release a fragment's bytes."""
        if self.runs.pop(run.place, None) is None:
            return
        self._charged -= run.charge
        if run.task_states and not self._is_measured:
            self._is_measured = True
            self._recharge(self.runs.values())

    def _recharge(self, runs: Iterable[FragmentState]) -> None:
        for run in runs:
            charge = self._charge(run)
            self._charged += charge - run.charge
            run.charge = charge

    def _charge(self, run: FragmentState) -> int:
        least = 0.0 if self._is_measured else _UNKNOWN_EXPANSION
        return int(_source(run) * max(self._expansion, least))


def _source(run: FragmentState) -> int:
    return max(run.fragment.bytes, run.bytes_read, _MIN_SOURCE_BYTES)
