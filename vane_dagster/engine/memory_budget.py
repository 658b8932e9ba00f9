"""Admission of fragments by measured bytes, so that memory stays bounded whatever comes in."""

from __future__ import annotations

from collections.abc import Iterable

from vane_dagster.engine.fragment_state import FragmentRun, TaskKind

_LEAST_EXPANSION = 3.0
_UNKNOWN_EXPANSION = 32.0
_LEAST_SOURCE = 1 << 20

_Stages = frozenset[tuple[str, bool]]


class Budget:
    """Bytes that the fragments under way may hold in shared memory, all stages together.

    A fragment is charged with its bytes at the source times the largest expansion measured so far:
    the most bytes that a fragment held at a time, over those of its source. Each report tells, so
    one that grows beyond what was expected stops admission while it is under way. As long as no
    fragment has come through the same stages, a large expansion is assumed.

    What was admitted in error is held back: where memory is too short for all to grow, the oldest
    go on alone, and always the first.
    """

    def __init__(self, limit: int, fragments: int) -> None:
        """Admits up to `limit` bytes and `fragments` fragments, and always one."""
        self._limit = limit
        self._most = fragments
        self._expansion = _LEAST_EXPANSION
        self._runs: dict[int, FragmentRun] = {}
        self._stages: dict[int, _Stages] = {}
        self._known: set[_Stages] = set()
        self._charges: dict[int, int] = {}
        self._charged = 0
        self._credited: dict[int, FragmentRun] = {}

    def admits(self, run: FragmentRun) -> bool:
        """Whether there is room for a fragment, counting what `charge` may drop for it."""
        if not self._runs:
            return True
        return len(self._runs) < self._most and self._is_possible(self._wanted_to_begin(run))

    def charge(self, run: FragmentRun) -> None:
        """Takes the bytes of a fragment that begins, and drops what waits for a join for them."""
        if self._runs:
            self._make_room(self._wanted_to_begin(run))
        self._runs[run.order] = run
        self._stages[run.order] = _stages(run)
        self._recharge([run])

    def take(self, run: FragmentRun, stage: str, kind: TaskKind, table_bytes: int) -> None:
        """Takes in a table that came back, and learns from what the fragment holds now."""
        run.hold(stage, kind, table_bytes)
        self._recharge([run, *self._credited.values()])
        if (measured := run.peak / _source(run)) > self._expansion:
            self._expansion = measured
            self._recharge(self._runs.values())

    def lets(self, run: FragmentRun) -> bool:
        """Whether a fragment under way may go on: those before it and it have room to grow.

        What `make_room` may drop for it counts as room.
        """
        return self._is_unrestrained(run) or self._is_possible(self._wanted_to_go_on(run))

    def make_room(self, run: FragmentRun) -> None:
        """Drops what waits for a join, as far as a fragment needs it to go on."""
        if not self._is_unrestrained(run):
            self._make_room(self._wanted_to_go_on(run))

    def release(self, run: FragmentRun) -> None:
        """Gives a fragment's bytes back."""
        if self._runs.pop(run.order, None) is None:
            return
        self._charged -= self._charges.pop(run.order)
        self._credited.pop(run.order, None)
        del self._stages[run.order]
        if (stages := _stages(run)) not in self._known:
            self._known.add(stages)
            self._recharge(self._runs.values())

    def _recharge(self, runs: Iterable[FragmentRun]) -> None:
        for run in runs:
            charge = self._charge(run, self._stages[run.order])
            self._charged += charge - self._charges.get(run.order, 0)
            self._charges[run.order] = charge

    def _charge(self, run: FragmentRun, stages: _Stages) -> int:
        is_known = any(stages <= known for known in self._known)
        expansion = self._expansion if is_known else max(self._expansion, _UNKNOWN_EXPANSION)
        return int(_source(run) * expansion) - run.dropped

    def _wanted_to_begin(self, run: FragmentRun) -> int:
        """All bytes that would be charged if a fragment began."""
        return self._charged + self._charge(run, _stages(run))

    def _is_unrestrained(self, run: FragmentRun) -> bool:
        """Whether memory is no reason to hold a fragment under way back."""
        return self._charged <= self._limit or run.order <= min(self._runs, default=run.order)

    def _wanted_to_go_on(self, run: FragmentRun) -> int:
        """The bytes that are held now, and what a fragment and those before it may grow by."""
        held = {order: under_way.held for order, under_way in self._runs.items()}
        growth = sum(
            max(0, self._charges[order] - held[order]) for order in held if order <= run.order
        )
        return sum(held.values()) + growth

    def _droppable(self) -> list[tuple[FragmentRun, str]]:
        """Tables that can be read again, of the youngest fragments first.

        Their joins are the furthest away.
        """
        youngest_first = sorted(self._runs.values(), key=lambda run: -run.order)
        return [(run, stage) for run in youngest_first for stage in run.droppable()]

    def _is_possible(self, wanted: int) -> bool:
        """Whether so many bytes are within the limit once all droppable tables are dropped."""
        short = wanted - self._limit
        if short <= 0:
            return True
        return short <= sum(run.nodes[stage].table_bytes for run, stage in self._droppable())

    def _make_room(self, wanted: int) -> None:
        """Drops tables until so many bytes are within the limit; none where that is impossible."""
        short = wanted - self._limit
        for run, stage in self._droppable() if self._is_possible(wanted) else ():
            if short > 0:
                short -= run.drop(stage)
                self._credited[run.order] = run
        self._recharge(self._credited.values())


def _source(run: FragmentRun) -> int:
    return max(run.fragment.bytes, run.bytes_read, _LEAST_SOURCE)


def _stages(run: FragmentRun) -> _Stages:
    """The stages that a fragment goes through, and of which of them only failed rows are made."""
    return frozenset((name, name in run.mends) for name in run.nodes)
