"""What a wave has done so far: counts by stage and partition, and progress told now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vane_dagster.execute.events import Progress
from vane_dagster.execute.fragment_run import FragmentRun
from vane_dagster.execute.run_state import RunState
from vane_dagster.execute.work import Report

_TOLD_SECONDS = 0.5


class Counts:
    """Counts the work on some stages of a run."""

    def __init__(self, state: RunState, stages: Sequence[str]) -> None:
        self._state = state
        self._total = {stage: state.plan_rows(stage) for stage in stages}
        self._behind = dict.fromkeys(stages, 0)
        self._began = self._told = time.perf_counter()

    def begin(self, run: FragmentRun, stage: str) -> None:
        """Takes note that work on a fragment begins."""
        stats = self._state.stats[run.partition, stage]
        stats.first = stats.first or time.perf_counter()

    def add(self, run: FragmentRun, stage: str, kind: str, report: Report) -> bool:
        """Takes in a piece of work.

        Returns:
            Whether it tells how fast the stage is.
        """
        stats = self._state.stats[run.partition, stage]
        stats.last = time.perf_counter()
        stats.work_seconds += report.seconds
        stats.call_seconds += report.call_seconds
        stats.batches += report.batches
        stats.retries += report.retries
        stats.fits = report.fits or stats.fits
        given = run.nodes[stage].given_rows
        rows = run.fragment.stop - run.fragment.start
        whole = kind == "whole" or (kind == "gather" and not given)
        if not whole and kind != "slice":
            return False
        stats.rows_in += report.tally.rows_in
        stats.faults += report.tally.quarantined + report.tally.nulled
        self._behind[stage] += rows if whole else int(report.tally.rows_in / given * rows)
        return True

    def add_part(self, run: FragmentRun, stage: str, rows: int) -> None:
        """Takes in that a fragment's part is written."""
        stats = self._state.stats[run.partition, stage]
        stats.computed += 1
        stats.rows_out += rows

    def tell(self, last: bool = False) -> None:
        """Tells how far the stages are, if it is time to."""
        now = time.perf_counter()
        if last or now - self._told >= _TOLD_SECONDS:
            self._told = now
            behind = {stage: min(n, self._total[stage]) for stage, n in self._behind.items()}
            self._state.emit(Progress(behind, dict(self._total), now - self._began))
