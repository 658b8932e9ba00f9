"""The fragments of a wave in order, of partitions that are claimed before their work begins."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vane_dagster.compute.waits import Waits, short
from vane_dagster.engine.accounting import WaveProgress
from vane_dagster.engine.fragment_state import FragmentState, bytes_read, make_task_states
from vane_dagster.engine.row_lookups import RowLookups
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import VaneError
from vane_dagster.events import Noticed
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.planning.plan import Part

_MIN_AHEAD = 4
_MAX_AHEAD = 64
_ASK_SECONDS = 0.5
_REPORT_AFTER_SECONDS = 1.0
_MAX_WAITING = 256
"""Waiting partitions that are looked at, at a time."""


@dataclass(frozen=True)
class _Claim:
    """The answer to a claim on a partition.

    Attributes:
        partition: Its index.
        names: The names of the claim.
        held_by: The run that has it; empty if it was granted.
        stored: The parts in the store by stage and fragment, if another run has worked on it.
    """

    partition: int
    names: Sequence[str]
    held_by: str
    stored: Mapping[str, Mapping[int, Part]]


class FragmentQueue:
    """Queue of the fragments that a wave must compute.

    A partition is claimed for all of its stages in the wave or for none, before its first fragment
    begins, and released when no fragment is left. Claims are made ahead, on the queue's own thread.
    If another run has a partition, it is put back and later ones are tried. It is requested again
    until that run has released it; then parts that are now in the store are used as if the planner
    had found them, and the rest is computed. What waits for another run thus holds neither memory
    nor claims. Partitions that wait for another one of this run are not claimed either; see
    `RowLookups`.

    Attributes:
        lookups: Where the rows of fragments are looked up.
    """

    def __init__(
        self,
        state: RunState,
        stages: Sequence[str],
        counts: WaveProgress,
        waits: Waits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._stages, self._claims = state, tuple(stages), state.claims
        self._counts, self._waits, self._clock = counts, waits, clock
        self._to_claim = state.fragments_left(stages)
        self._fresh = deque(self._to_claim)
        self._has_fresh = True
        self._blocked: dict[int, str] = {}
        self._ready: deque[tuple[int, int]] = deque()
        self._unfinished: dict[int, int] = {}
        self._names: dict[int, Sequence[str]] = {}
        self._releases: list[str] = []
        self.lookups = RowLookups(state)
        self._asked_at = 0.0
        self._asking: Future[list[_Claim]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vane-claim")

    @property
    def is_empty(self) -> bool:
        """Whether no more fragments will be handed out."""
        return self.is_last and not self._blocked and not self._fresh

    @property
    def is_last(self) -> bool:
        """Whether no more will be handed out, until other fragments are computed."""
        return not (self._ready or self._has_fresh or self._asking)

    @property
    def is_claiming(self) -> bool:
        """Whether the queue waits for claims on the next partition."""
        return self._asking is not None and not self._ready

    def peek(self) -> FragmentState | None:
        """The next fragment, after those that were given up; None if there is none at present."""
        while self._ready:
            partition, index = self._ready[0]
            if not (specs := self._specs(partition, index)):
                self.pop()
                self.end(partition)
                continue
            record = self._state.plan.partitions[partition].fragments[index]
            states = make_task_states(self._state.pipeline, specs)
            fragment = FragmentState(partition, index, record, states)
            fragment.bytes_read = bytes_read(self._state.parts, partition, index, specs)
            lookups = {stage: self.lookups.resolve(partition, stage) for stage in states}
            fragment.known = {
                stage: lookup for stage, lookup in lookups.items() if lookup is not None
            }
            return fragment
        return None

    def pop(self) -> None:
        """Remove the next fragment."""
        self._ready.popleft()

    def end(self, partition: int) -> None:
        """Count a fragment with no more work; release its partition after the last one."""
        self._unfinished[partition] -= 1
        if not self._unfinished[partition]:
            self._releases += self._names.pop(partition)

    def apply_claims(self) -> None:
        """Process the answer to the last claims, if it has arrived."""
        if self._asking is None or not self._asking.done():
            return
        claims, self._asking = self._asking.result(), None
        for claim in claims:
            partition = claim.partition
            self._blocked.pop(partition, None)
            if claim.held_by:
                self._blocked[partition] = claim.held_by
                continue
            for stage, parts in claim.stored.items():
                for index, part in parts.items():
                    self._counts.take_stored(partition, index, stage)
                    self._state.add_part(partition, stage, index, part)
            planned = self._to_claim.pop(partition)
            left = [index for index in planned if self._specs(partition, index)]
            self._ready += ((partition, index) for index in left)
            if left:
                self._unfinished[partition], self._names[partition] = len(left), claim.names
            else:
                self._releases += claim.names

    def claim_ahead(self, in_progress: int) -> None:
        """Claim partitions ahead and release finished ones, without waiting for the answer."""
        if self._asking is not None:
            return
        now, ahead = self._clock(), min(_MAX_AHEAD, max(_MIN_AHEAD, in_progress))
        is_short = len(self._ready) <= ahead // 2
        asked = self._next_fresh(ahead, idle=not in_progress) if is_short else []
        if is_due := now - self._asked_at >= _ASK_SECONDS:
            self._asked_at = now
            asked += itertools.islice(self._blocked, _MAX_WAITING)
        if asked or (is_due and self._releases):
            releases, self._releases = self._releases, []
            due = [(partition, self._due(partition)) for partition in asked]
            self._asking = self._thread.submit(self._ask, due, releases)

    def report_waits(self, idle: bool) -> None:
        """Report the runs that are waited for, if nothing can be done before they end."""
        if idle and self._blocked and not (self._ready or self._has_fresh):
            runs, n = sorted({*self._blocked.values()}), len(self._blocked)
            text = f"waiting for {n:,} partition{'s' * (n > 1)} of {short(runs)}"
            self._waits.begin("partitions", text, _REPORT_AFTER_SECONDS)
        else:
            self._waits.end("partitions", "no longer waiting for other runs")

    def close(self) -> None:
        """Release all partitions, except for those in an answer that was not processed."""
        self._thread.shutdown()
        self.report_waits(idle=False)
        if releases := [*self._releases, *itertools.chain(*self._names.values())]:
            self._claims.ask((), releases)

    # On the queue's own thread

    def _ask(
        self, due: Sequence[tuple[int, Sequence[str]]], releases: Sequence[str]
    ) -> list[_Claim]:
        state, age = self._state, self._clock() - self._state.plan.listed_at
        names = [[state.claim_name(partition, s) for s in stages] for partition, stages in due]
        claims = list[_Claim]()
        answers = self._claims.ask(names, releases, age)
        for (partition, stages), own, answer in zip(due, names, answers):
            stored = self._parts(partition) if answer.is_changed else {}
            claims.append(_Claim(partition, own, answer.held_by, stored))
            for stage in () if answer.held_by else stages:
                self.lookups.resolve(partition, stage)  # it remembers what it has read
        return claims

    def _parts(self, partition: int) -> Mapping[str, Mapping[int, Part]]:
        try:
            return self._state.look_up(partition, self._stages)
        except VaneError as error:  # they are recomputed
            self._state.emit(Noticed(f"parts of another run could not be looked up: {error}"))
            return {}

    # Next partitions

    def _next_fresh(self, room: int, idle: bool) -> list[int]:
        """The next partitions to claim, except for those that must wait for another partition."""
        taken, waiting = list[int](), list[int]()
        while self._fresh and room > 0 and len(waiting) < _MAX_WAITING:
            partition = self._fresh.popleft()
            if self.lookups.must_wait(partition, self._due(partition)):
                waiting.append(partition)
            else:
                taken.append(partition)
                room -= len(self._to_claim[partition])
        self._has_fresh = room <= 0 and bool(self._fresh)
        if idle and waiting and not (taken or self._ready or self._blocked):
            taken.append(waiting.pop(0))  # it would wait forever
        self._fresh.extendleft(reversed(waiting))
        return taken

    def _due(self, partition: int) -> list[str]:
        """The stages of the wave to compute in a partition, upstream first."""
        return self._state.due(partition, self._stages)

    def _specs(self, partition: int, index: int) -> list[StageSpec]:
        """The stages of the wave to compute for a fragment, upstream first."""
        state = self._state
        left = (s for s in self._due(partition) if state.is_left(partition, s, index))
        return [state.pipeline[stage].spec for stage in left]
