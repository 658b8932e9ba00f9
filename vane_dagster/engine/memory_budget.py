"""Admission of fragments by measured bytes, which bounds memory for any input."""

from __future__ import annotations

from collections.abc import Iterable

from vane_dagster.engine.fragment_state import FragmentState, TaskKind

_MIN_EXPANSION = 3.0
_UNKNOWN_EXPANSION = 32.0
_MIN_SOURCE_BYTES = 1 << 20

_Stages = frozenset[tuple[str, bool]]


class MemoryBudget:
    """Bytes that the fragments in progress may hold in shared memory, all stages together.

    A fragment is charged its source bytes times the largest expansion measured so far: the maximum
    bytes that a fragment held at one time, divided by its source bytes. Every report updates it, so
    a fragment that outgrows the estimate stops admission while it is in progress. Until a fragment
    has completed the same stages, a large expansion is assumed.

    Fragments admitted in error are held back: if memory is too short for all to grow, only the
    oldest continue, and the first always does.
    """

    def __init__(self, limit: int, fragments: int) -> None:
        """Admit fragments within the limits, and always at least one."""
        self._limit = limit
        self._most = fragments
        self._expansion = _MIN_EXPANSION
        self._runs: dict[int, FragmentState] = {}
        self._stages: dict[int, _Stages] = {}
        self._known: set[_Stages] = set()
        self._charges: dict[int, int] = {}
        self._charged = 0

    def has_room_for(self, run: FragmentState) -> bool:
        """Whether there is room for a fragment."""
        if not self._runs:
            return True
        wanted = self._charged + self._charge(run, _stages(run))
        return len(self._runs) < self._most and wanted <= self._limit

    def charge(self, run: FragmentState) -> None:
        """Charge a new fragment."""
        self._runs[run.order] = run
        self._stages[run.order] = _stages(run)
        self._recharge([run])

    def record_table(
        self, run: FragmentState, stage: str, kind: TaskKind, table_bytes: int
    ) -> None:
        """Record a returned table; update the expansion from the bytes that the fragment holds."""
        run.hold(stage, kind, table_bytes)
        if (measured := run.peak / _source(run)) > self._expansion:
            self._expansion = measured
            self._recharge(self._runs.values())

    def may_continue(self, run: FragmentState) -> bool:
        """Whether a fragment in progress may continue: it and earlier ones have room to grow."""
        if self._charged <= self._limit or run.order <= min(self._runs):
            return True
        held = {order: under_way.held for order, under_way in self._runs.items()}
        growth = sum(
            max(0, self._charges[order] - held[order]) for order in held if order <= run.order
        )
        return sum(held.values()) + growth <= self._limit

    def release(self, run: FragmentState) -> None:
        """Release a fragment's bytes."""
        if self._runs.pop(run.order, None) is None:
            return
        self._charged -= self._charges.pop(run.order)
        del self._stages[run.order]
        if (stages := _stages(run)) not in self._known:
            self._known.add(stages)
            self._recharge(self._runs.values())

    def _recharge(self, runs: Iterable[FragmentState]) -> None:
        for run in runs:
            charge = self._charge(run, self._stages[run.order])
            self._charged += charge - self._charges.get(run.order, 0)
            self._charges[run.order] = charge

    def _charge(self, run: FragmentState, stages: _Stages) -> int:
        is_known = any(stages <= known for known in self._known)
        expansion = self._expansion if is_known else max(self._expansion, _UNKNOWN_EXPANSION)
        return int(_source(run) * expansion)


def _source(run: FragmentState) -> int:
    return max(run.fragment.bytes, run.bytes_read, _MIN_SOURCE_BYTES)


def _stages(run: FragmentState) -> _Stages:
    """The stages of a fragment, each with whether its rows are likely to be new."""
    return frozenset((name, run.expects_new_rows(name)) for name in run.task_states)
