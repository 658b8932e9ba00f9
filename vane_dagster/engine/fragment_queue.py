"""The fragments of a wave in order, each claimed before its work begins."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vane_dagster.compute.waits import Waits, short
from vane_dagster.compute.work_claims import ClaimAnswer, Group, claim_key
from vane_dagster.engine.accounting import WaveProgress
from vane_dagster.engine.fragment_state import FragmentState, bytes_read, make_task_states
from vane_dagster.engine.row_lookups import RowLookups
from vane_dagster.engine.run_state import RunState
from vane_dagster.errors import VaneError
from vane_dagster.events import Noticed
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.planning.plan import Part

FoundParts = Mapping[str, Mapping[int, Part]]
"""Parts of a partition, by stage and fragment index."""
_MIN_AHEAD = 4
_MAX_AHEAD = 64
_RELEASE_SECONDS = 0.2
_RETRY_SECONDS = 2.0
_RETRY_IDLE_SECONDS = 0.5
_MAX_RETRIED = 256
_REPORT_AFTER_SECONDS = 1.0
_MAX_HELD = 256
"""Waiting partitions that are looked at, at a time."""


_Place = tuple[int, int]
"""A fragment of the wave: its partition, and its index there."""
_ClaimGroups = Sequence[tuple[_Place, Mapping[str, bytes]]]
"""Fragments, each with the names of the claims on it by stage."""


@dataclass(frozen=True)
class _ClaimResult:
    """The answers to claims on fragments, and what was read for those that were granted.

    Attributes:
        asked: The fragments.
        claims: The answers.
        listed_at: Monotonic time at which partitions were listed again.
        stored: The parts of partitions that other runs worked on.
    """

    asked: _ClaimGroups
    claims: ClaimAnswer
    listed_at: float
    stored: Mapping[int, FoundParts]


class FragmentQueue:
    """Queue of the fragments that a wave must compute.

    A fragment's stages are claimed together or not at all, on the queue's own thread, and as many
    fragments ahead of their admission as are in progress. If another run computes a fragment, it is
    put back and later ones are tried. It is requested again until that run has released it; then
    parts that are now in the store are used as if the planner had found them, and the rest is
    computed. A fragment that waits for another run thus holds neither memory nor claims. The same
    holds for the fragments of a partition that waits for another one of this run; see `RowLookups`.

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
        self._left = {
            partition: zip(itertools.repeat(partition), range(len(planned.fragments)))
            for partition, planned in enumerate(state.plan.partitions)
        }
        self._has_fresh = True
        self._ready: deque[FragmentState] = deque()
        self._blocked: dict[_Place, str] = {}
        self.lookups = RowLookups(state)
        self._mine: set[_Place] = set()
        self._releases: list[bytes] = []
        self._listed_at: dict[int, float] = {}
        self._ahead = _MIN_AHEAD
        self._asked_at = self._retried_at = 0.0
        self._asking: Future[_ClaimResult] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vane-claim")
        self.left = state.fragments_left(stages)
        """Upper bound of the fragments not yet handed out or found; some may be given up."""

    @property
    def is_empty(self) -> bool:
        """Whether no more fragments will be handed out."""
        return self.is_last and not self._blocked and not self._left

    @property
    def is_last(self) -> bool:
        """Whether no more will be handed out, until other fragments are computed."""
        return not (self._ready or self._has_fresh or self._asking)

    @property
    def is_claiming(self) -> bool:
        """Whether the queue waits for claims on the next fragment."""
        return self._asking is not None and not self._ready

    def drop_given_up(self) -> None:
        """Remove failed stages from the next fragments; drop fragments without other stages."""
        while run := self.peek():
            failed, stages = self._state.failed, run.task_states
            is_damaged = run.place in self._state.damaged
            run.abandon({s for s in stages if is_damaged or (run.partition, s) in failed})
            if run.task_states:
                return
            self.end(self.pop())

    def peek(self) -> FragmentState | None:
        """The next fragment; None if there is none at present."""
        return self._ready[0] if self._ready else None

    def pop(self) -> FragmentState:
        """Remove and return the next fragment."""
        self.left -= 1
        return self._ready.popleft()

    def end(self, run: FragmentState) -> None:
        """Release the claims of a fragment with no more work."""
        self._releases += run.claims
        self._mine.discard(run.place)

    def apply_claims(self) -> None:
        """Process the answer to the last claims, if it has arrived."""
        if self._asking is None or not self._asking.done():
            return
        answered, self._asking = self._asking.result(), None
        for partition, parts in answered.stored.items():
            self._listed_at[partition] = answered.listed_at
            self._take_stored(partition, parts)
        for (place, keys), other in zip(answered.asked, answered.claims.held_by):
            self._blocked.pop(place, None)
            if other:
                self._blocked[place] = other
            else:
                self._take_granted(place, keys)

    def claim_ahead(self, in_progress: int) -> None:
        """Claim fragments ahead and release finished ones, without waiting for the answer."""
        if self._asking is not None:
            return
        now, idle = self._clock(), not in_progress
        self._ahead = min(_MAX_AHEAD, max(_MIN_AHEAD, in_progress))
        places = self._next_fresh(idle) if len(self._ready) <= self._ahead // 2 else []
        if now - self._retried_at >= (_RETRY_IDLE_SECONDS if idle else _RETRY_SECONDS):
            self._retried_at = now
            places += list(self._blocked)[:_MAX_RETRIED]
        asked = [(place, self._keys(place)) for place in places]
        for place, keys in asked:
            if not keys and self._blocked.pop(place, ""):
                self.left -= 1
        asked = [(place, keys) for place, keys in asked if keys]
        if asked or (self._releases and now - self._asked_at >= _RELEASE_SECONDS):
            self._asked_at = now
            releases, self._releases = self._releases, []
            self._asking = self._thread.submit(self._ask, asked, releases)

    def report_waits(self, idle: bool) -> None:
        """Report the runs that are waited for, if nothing can be done before they end."""
        others_have_all = self._blocked and not (self._ready or self._has_fresh)
        if not (idle and others_have_all):
            self._end_wait()
            return
        runs, n = sorted({*self._blocked.values()}), len(self._blocked)
        text = f"waiting for {n:,} fragment{'s' * (n > 1)} of {short(runs)}"
        self._waits.begin("fragments", text, _REPORT_AFTER_SECONDS)

    def _end_wait(self) -> None:
        self._waits.end("fragments", "no longer waiting for other runs")

    def close(self) -> None:
        """Release all claims of the wave."""
        self._thread.shutdown()
        self._end_wait()
        if self._asking is not None and self._asking.exception() is None:
            answered = self._asking.result()
            for (_, keys), other in zip(answered.asked, answered.claims.held_by):
                self._releases += [] if other else keys.values()
        for run in self._ready:
            self.end(run)
        if self._releases:
            self._claims.ask((), self._releases)

    # On the queue's own thread

    def _ask(self, asked: _ClaimGroups, releases: Sequence[bytes]) -> _ClaimResult:
        plan, scope_of = self._state.plan, self._state.claim_scope
        scopes = {p: scope_of(plan.partitions[p].key) for (p, _), _ in asked}
        now = self._clock()
        answer = self._claims.ask(
            [Group(scopes[p], tuple(keys.values())) for (p, _), keys in asked],
            releases,
            {scope: now - self._listed_at.get(p, plan.listed_at) for p, scope in scopes.items()},
        )
        granted = [each for each, other in zip(asked, answer.held_by) if not other]
        listed_at = self._clock()
        changed = {p for (p, _), _ in granted if scopes[p] in answer.changed}
        stored = {p: self._parts(p) for p in changed}
        for partition, stage in {(p, stage) for (p, _), keys in granted for stage in keys}:
            self.lookups.resolve(partition, stage)  # it remembers what it has read
        return _ClaimResult(asked, answer, listed_at, stored)

    def _parts(self, partition: int) -> FoundParts:
        try:
            return self._state.look_up(partition, self._stages)
        except VaneError as error:  # they are recomputed
            self._state.emit(Noticed(f"parts of another run could not be looked up: {error}"))
            return {}

    # Next fragments

    def _next_fresh(self, idle: bool) -> list[_Place]:
        """The next fragments to claim, of partitions that need not wait for other partitions."""
        places, waiting = list[_Place](), 0
        for partition in list(self._left):
            if len(places) >= self._ahead or waiting >= _MAX_HELD:
                break
            planned, failed = self._state.plan.partitions[partition], self._state.failed
            due = [
                stage
                for stage in self._stages
                if not planned.stages[stage].done and (partition, stage) not in failed
            ]
            if self.lookups.must_wait(partition, due):
                waiting += 1
            else:
                places += self._take(partition, self._ahead - len(places))
        if idle and self._left and not (places or self._ready or self._blocked):
            places = self._take(next(iter(self._left)), self._ahead)  # it would wait forever
        self._has_fresh = len(places) >= self._ahead
        return places

    def _take(self, partition: int, most: int) -> list[_Place]:
        """Take fragments of a partition."""
        taken = [*itertools.islice(filter(self._to_compute, self._left[partition]), most)]
        if len(taken) < most:
            del self._left[partition]
        return taken

    def _to_compute(self, place: _Place) -> list[StageSpec]:
        """The stages of the wave to compute for a fragment, upstream first.

        Excludes stages that have a part and stages that were given up.
        """
        state, (partition, index) = self._state, place
        planned = state.plan.partitions[partition]
        if place in state.damaged:
            return []
        return [
            state.pipeline[stage].spec
            for stage in self._stages
            if not planned.stages[stage].done
            and index not in state.parts[partition, stage]
            and (partition, stage) not in state.failed
            and not state.pending.has(partition, stage, index)
        ]

    def _take_stored(self, partition: int, stored: FoundParts) -> None:
        """Use parts that another run has written, except for fragments in progress here."""
        for stage, parts in stored.items():
            for index, part in parts.items():
                if (partition, index) in self._mine or (partition, stage) in self._state.failed:
                    continue
                if index not in self._state.parts[partition, stage]:
                    self._counts.take_stored(partition, index, stage)
                    self._state.add_part(partition, stage, index, part)

    def _take_granted(self, place: _Place, keys: Mapping[str, bytes]) -> None:
        specs = self._to_compute(place)
        if not specs:
            self._releases += keys.values()
            self.left -= 1
            return
        partition, index = place
        fragment = self._state.plan.partitions[partition].fragments[index]
        run = FragmentState(*place, fragment, make_task_states(self._state.pipeline, specs))
        run.bytes_read = bytes_read(self._state.parts, partition, index, specs)
        run.claims = tuple(keys.values())
        lookups = {spec.name: self.lookups.resolve(partition, spec.name) for spec in specs}
        run.known = {stage: lookup for stage, lookup in lookups.items() if lookup is not None}
        self._mine.add(place)
        self._ready.append(run)

    # Names of claims

    def _keys(self, place: _Place) -> dict[str, bytes]:
        """The names of the claims that a fragment needs, by stage; empty if it is done."""
        specs, (partition, index) = self._to_compute(place), place
        planned = self._state.plan.partitions[partition]
        scope = self._state.claim_scope(planned.key)
        return {
            spec.name: claim_key(scope, spec.name, planned.stages[spec.name].keys[index])
            for spec in specs
        }
