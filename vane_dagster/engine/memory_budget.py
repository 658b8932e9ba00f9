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
        self._credited: dict[int, FragmentState] = {}

    def has_room_for(self, run: FragmentState) -> bool:
        """Whether there is room for a fragment, including tables that `charge` may drop for it."""
        if not self._runs:
            return True
        return len(self._runs) < self._most and self._is_possible(self._wanted_to_begin(run))

    def charge(self, run: FragmentState) -> None:
        """Charge a new fragment, and drop tables that wait for a join to make room for it."""
        if self._runs:
            self._make_room(self._wanted_to_begin(run))
        self._runs[run.order] = run
        self._stages[run.order] = _stages(run)
        self._recharge([run])

    def record_table(
        self, run: FragmentState, stage: str, kind: TaskKind, table_bytes: int
    ) -> None:
        """Record a returned table; update the expansion from the bytes that the fragment holds."""
        run.hold(stage, kind, table_bytes)
        self._recharge([run, *self._credited.values()])
        if (measured := run.peak / _source(run)) > self._expansion:
            self._expansion = measured
            self._recharge(self._runs.values())

    def may_continue(self, run: FragmentState) -> bool:
        """Whether a fragment in progress may continue: it and earlier ones have room to grow.

        Tables that `make_room` may drop for it count as room.
        """
        return self._is_unrestrained(run) or self._is_possible(self._wanted_to_go_on(run))

    def make_room(self, run: FragmentState) -> None:
        """Drop tables that wait for a join, as far as a fragment needs the room to continue."""
        if not self._is_unrestrained(run):
            self._make_room(self._wanted_to_go_on(run))

    def release(self, run: FragmentState) -> None:
        """Release a fragment's bytes."""
        if self._runs.pop(run.order, None) is None:
            return
        self._charged -= self._charges.pop(run.order)
        self._credited.pop(run.order, None)
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
        return int(_source(run) * expansion) - run.dropped

    def _wanted_to_begin(self, run: FragmentState) -> int:
        """All bytes charged if a fragment began."""
        return self._charged + self._charge(run, _stages(run))

    def _is_unrestrained(self, run: FragmentState) -> bool:
        """Whether memory is no reason to hold back a fragment in progress."""
        if self._charged <= self._limit:
            return True
        return run.order <= min(self._runs)

    def _wanted_to_go_on(self, run: FragmentState) -> int:
        """The bytes now held, plus the possible growth of a fragment and of those before it."""
        held = {order: under_way.held for order, under_way in self._runs.items()}
        growth = sum(
            max(0, self._charges[order] - held[order]) for order in held if order <= run.order
        )
        return sum(held.values()) + growth

    def _droppable(self) -> list[tuple[FragmentState, str]]:
        """Tables that can be read again, those of the youngest fragments first.

        Their joins are the furthest away.
        """
        youngest_first = sorted(self._runs.values(), key=lambda run: -run.order)
        return [(run, stage) for run in youngest_first for stage in run.droppable()]

    def _is_possible(self, wanted: int) -> bool:
        """Whether `wanted` bytes are within the limit once all droppable tables are dropped."""
        short = wanted - self._limit
        if short <= 0:
            return True
        return short <= sum(run.task_states[stage].table_bytes for run, stage in self._droppable())

    def _make_room(self, wanted: int) -> None:
        """Drop tables until `wanted` bytes are within the limit; none if that is impossible."""
        short = wanted - self._limit
        for run, stage in self._droppable() if short > 0 and self._is_possible(wanted) else ():
            if short > 0:
                short -= run.drop(stage)
                self._credited[run.order] = run
        self._recharge(self._credited.values())


def _source(run: FragmentState) -> int:
    return max(run.fragment.bytes, run.bytes_read, _MIN_SOURCE_BYTES)


def _stages(run: FragmentState) -> _Stages:
    """The stages of a fragment, each with whether its rows are likely to be new."""
    return frozenset((name, run.expects_new_rows(name)) for name in run.task_states)
