"""Counts of a wave by stage and partition, progress, and verification of row counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from vane_dagster.engine.fragment_state import FragmentState, StageTaskState, TaskKind
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.worker_group import WorkerQueue
from vane_dagster.errors import IntegrityError, VaneError
from vane_dagster.events import PoolTime, Progress, StageStats
from vane_dagster.pipeline.specs import StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.worker.reports import SharedSeconds, WorkReport

_PROGRESS_SECONDS = 0.5


class PoolClock:
    """Measures how the workers of a pool spend a wave.

    Attributes:
        time: The measured times. Idle time is included when the pool has its next call.
    """

    def __init__(self, time: PoolTime) -> None:
        self.time = time
        self._workers: dict[str, int] = {}
        self._since_last_call: dict[str, float] = {}

    def advance(self, seconds: float, worker_queue: WorkerQueue, lacks_room: bool) -> None:
        """Add the time since the last look, and look again at what the workers do."""
        times = self._since_last_call
        for name, workers in self._workers.items():
            times[name] = times.get(name, 0.0) + workers * seconds
        if self._workers.get("computing") or self._workers.get("loading"):
            added = {name: getattr(self.time, name) + time for name, time in times.items()}
            self.time = replace(self.time, **added)
            times.clear()
        ready, loading = worker_queue.calls_by_worker, len(worker_queue.loading)
        busy = sum(map(bool, ready.values()))
        idle = "room" if lacks_room else "input"
        self._workers = {"computing": busy, "loading": loading, idle: len(ready) - busy}
        if worker_queue.size > self.time.workers:
            self.time = replace(self.time, workers=worker_queue.size)


class WaveProgress:
    """Counts the work on the stages of a wave, and estimates their input rows.

    A stage after a filter gets fewer rows than the source has, one after a fan-out more. So a
    fragment counts with its source rows until its input is known, times the ratio of input rows to
    source rows in the fragments with known input.
    """

    def __init__(
        self,
        state: RunState,
        stages: Sequence[str],
        clock: Callable[[], float] = time.perf_counter,
        pools: Mapping[str, PoolClock] = MappingProxyType({}),
    ) -> None:
        self._state, self._clock, self._pools = state, clock, pools
        self._source_rows = {stage: _source_rows(state, stage) for stage in stages}
        self._input_rows: dict[str, dict[tuple[int, int], int]] = {stage: {} for stage in stages}
        for stage, expected in self._source_rows.items():
            upstream = state.pipeline[stage].spec.upstream
            for index, i in expected if len(upstream) == 1 else ():
                if (above := state.parts.get((index, upstream[0]), {}).get(i)) is not None:
                    self._input_rows[stage][index, i] = above.info.rows
        self._shared = {stage: SharedSeconds() for stage in stages}
        self._began = self._last_emitted = clock()

    def begin(self, fragment: FragmentState, stage: str) -> None:
        """Record that a call on a fragment was assigned to a worker."""
        self._change_calls(fragment, stage, 1)

    def end(self, fragment: FragmentState, stage: str, report: WorkReport | None) -> None:
        """Record that a call on a fragment ended."""
        stats = self._change_calls(fragment, stage, -1)
        if report is not None:
            stats.work_seconds += report.seconds
            stats.call_seconds += report.call_seconds
            stats.batches += report.batches
            stats.retries += report.retries
            stats.rate_limited += report.rate_limited
            stats.fits = report.fits or stats.fits
            stats.gpus += report.gpus

    def _change_calls(self, fragment: FragmentState, stage: str, calls: int) -> StageStats:
        stats = self._state.stats[fragment.partition, stage]
        stats.seconds += self._shared[stage].change(fragment.partition, calls, self._clock())
        return stats

    def set_input_rows(self, fragment: FragmentState, stage: str, rows: int) -> None:
        """Record the number of input rows of a stage for a fragment."""
        if fragment.place in self._source_rows[stage]:
            self._input_rows[stage][fragment.place] = rows

    def add(self, fragment: FragmentState, stage: str, kind: TaskKind, report: WorkReport) -> None:
        """Add the rows of a completed task."""
        stats, tally = self._state.stats[fragment.partition, stage], report.tally
        if (part := report.part) is not None:  # with copied failures, and those of equal rows
            stats.faults += (
                part.quarantined + part.nulled - fragment.task_states[stage].tally.faults
            )
        if kind not in ("whole", "slice"):
            return
        stats.rows_in += tally.rows_in - tally.unread
        stats.rows_out += report.rows_out
        stats.faults += tally.faults if kind == "slice" else 0

    def add_part(self, fragment: FragmentState, written: StageTaskState, part: PartInfo) -> None:
        """Record that a fragment's part was written.

        Rows that the part takes from other parts were not computed by this run.
        """
        stage, rows = written.spec.name, part.rows
        stats = self._state.stats[fragment.partition, stage]
        stats.computed += 1
        stats.copied += part.copied
        self.set_input_rows(fragment, stage, part.rows_in - part.unread)
        if (usage := written.spec.usage) is not None:
            stats.spent.update(usage.used(part.spent))
        for name, task_state in fragment.task_states.items():
            if task_state.spec.upstream == (stage,):
                self.set_input_rows(fragment, name, rows)

    def start_over(self, fragment: FragmentState) -> None:
        """Subtract the rows of a fragment's slices, which are computed again."""
        for stage, task_state in fragment.task_states.items():
            if not task_state.done:
                stats = self._state.stats[fragment.partition, stage]
                stats.rows_in -= task_state.tally.rows_in - task_state.tally.unread
                stats.rows_out -= sum(piece.rows for piece in task_state.pieces.values())
                stats.faults -= task_state.tally.faults

    def take_stored(self, partition: int, index: int, stage: str) -> None:
        """Record that a part to be computed is already in the store: another run wrote it."""
        for rows in (self._source_rows[stage], self._input_rows[stage]):
            rows.pop((partition, index), None)

    def emit_progress(
        self, last: bool = False, queued: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """Emit the progress of the stages, and the tasks that are queued, if it is due."""
        now = self._clock()
        if not last and now - self._last_emitted < _PROGRESS_SECONDS:
            return
        self._last_emitted = now
        places, stats = range(len(self._state.plan.partitions)), self._state.stats
        done = {s: sum(stats[i, s].rows_done for i in places) for s in self._source_rows}
        total = {s: n if last else max(n, self._expected(s)) for s, n in done.items()}
        pools = tuple(each.time for each in self._pools.values())
        self._state.emit(Progress(done, total, now - self._began, pools, queued()))

    def _expected(self, stage: str) -> int:
        """Estimate the input rows of a stage; exact once the input of every fragment is known."""
        known, source = self._input_rows[stage], self._source_rows[stage]
        of_known, rows = sum(source[each] for each in known), sum(known.values())
        unknown = sum(source.values()) - of_known
        return rows + round(unknown * (rows / of_known if of_known else 1.0))


def _source_rows(state: RunState, stage: str) -> dict[tuple[int, int], int]:
    """The source rows of the fragments that a stage must compute, by partition and fragment."""
    left, partitions = state.fragments_left([stage]), state.plan.partitions
    return {
        (p, i): partitions[p].fragments[i].rows for p, fragments in left.items() for i in fragments
    }


def count_error(
    state: RunState, fragment: FragmentState, spec: StageSpec, part: PartInfo, location: str
) -> VaneError | None:
    """Return the error in a part's counts, or None; the caller removes a part with an error."""
    base = spec.base_node(state.pipeline)
    above = state.parts[fragment.partition, base][fragment.index] if base != SOURCE else None
    expected = above.info.rows if above else fragment.rows
    sample = state.plan.partitions[fragment.partition].sample
    expected = len(sample[fragment.index]) if sample else expected
    passed = part.rows_in - part.filtered - part.quarantined
    if (
        part.rows_in == expected
        and (part.rows >= passed if spec.makes_rows else part.rows == passed)
        and (part.filtered == 0 or spec.may_filter)
    ):
        return None
    return IntegrityError(
        f"{location}: {part.rows_in} of {expected} input rows, {part.filtered} filtered, "
        f"{part.quarantined} quarantined, {part.rows} output rows; expected each row of {base!r} "
        "to be filtered, quarantined or in the output. The part was removed. If its input was "
        "edited in the store by hand, materialize that stage again with force"
    )
