"""What a wave has done: counts by stage and partition, progress, and rows that must add up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from vane_dagster.engine.fragment_state import FragmentRun, TaskKind
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.tasks import Requests
from vane_dagster.errors import IntegrityError, UdfError, VaneError, names
from vane_dagster.events import Progress
from vane_dagster.pipeline.specs import SOURCE, StageSpec
from vane_dagster.planning.plan import Part
from vane_dagster.storage.part_file import read_part
from vane_dagster.worker.protocol import Report

_TOLD_SECONDS = 0.5


class StageRows:
    """Input rows of one stage: those computed, and an estimate of all of them.

    A stage after a filter gets fewer rows than the source has, one after a one-to-many stage more.
    So a fragment counts with its source rows until its input is known, times the ratio of input
    rows to source rows in the fragments whose input is known.
    """

    def __init__(self) -> None:
        self.done = 0
        self._done: Counter[int] = Counter()
        self._source: dict[int, dict[int, int]] = {}
        self._known: dict[int, dict[int, int]] = {}
        self._unknown_source = self._known_source = self._known_rows = self._given_up_rows = 0

    def expect(self, partition: int, fragment: int, source_rows: int) -> None:
        """Adds a fragment that will be computed."""
        self._source.setdefault(partition, {})[fragment] = source_rows
        self._unknown_source += source_rows

    def know(self, partition: int, fragment: int, rows: int) -> None:
        """Takes in how many rows the stage gets for a fragment."""
        if (source := self._source.get(partition, {}).get(fragment)) is None:
            return
        known = self._known.setdefault(partition, {})
        if fragment not in known:
            self._unknown_source -= source
            self._known_source += source
        self._known_rows += rows - known.get(fragment, 0)
        known[fragment] = rows

    def add(self, partition: int, rows: int) -> None:
        """Adds computed rows; a negative number where a fragment starts over."""
        self.done += rows
        self._done[partition] += rows
        if partition not in self._source:
            self._given_up_rows += rows

    def drop(self, partition: int, fragment: int) -> None:
        """Removes a fragment of which nothing is computed from the total."""
        if (source := self._source.get(partition, {}).pop(fragment, None)) is None:
            return
        known = self._known.get(partition, {})
        if fragment in known:
            self._known_source -= source
            self._known_rows -= known.pop(fragment)
        else:
            self._unknown_source -= source

    def give_up(self, partition: int) -> None:
        """Removes what is left of a partition from the total."""
        for fragment in list(self._source.get(partition, ())):
            self.drop(partition, fragment)
        if self._source.pop(partition, None) is not None:
            self._given_up_rows += self._done[partition]

    @property
    def total(self) -> int:
        """The estimate; exact as soon as the input of every fragment is known."""
        ratio = self._known_rows / self._known_source if self._known_source else 1.0
        estimate = self._known_rows + round(self._unknown_source * ratio)
        return max(self.done, self._given_up_rows + estimate)


class Counts:
    """Counts the work on some stages of a run.

    Args:
        state: The run.
        stages: The stages of the wave.
        clock: Gives seconds; only differences count.
    """

    def __init__(
        self,
        state: RunState,
        stages: Sequence[str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state, self._clock = state, clock
        self._rows = {stage: _expected(state, stage) for stage in stages}
        self._failed = set(state.failed)
        self._in_flight: dict[str, Counter[int]] = {stage: Counter() for stage in stages}
        self._shared_at = dict.fromkeys(stages, 0.0)
        self._began = self._told = clock()

    def begin(self, run: FragmentRun, stage: str) -> None:
        """A call on a fragment was handed to a worker."""
        self._share(stage)
        self._in_flight[stage][run.partition] += 1

    def end(self, run: FragmentRun, stage: str, report: Report | None) -> None:
        """Such a call ended; with what the worker reports of it, if it was not lost."""
        self._share(stage)
        in_flight = self._in_flight[stage]
        in_flight[run.partition] -= 1
        if not in_flight[run.partition]:
            del in_flight[run.partition]
        if report is not None:
            stats = self._state.stats[run.partition, stage]
            stats.work_seconds += report.seconds
            stats.call_seconds += report.call_seconds
            stats.batches += report.batches
            stats.retries += report.retries
            stats.fits = report.fits or stats.fits

    def _share(self, stage: str) -> None:
        """Divides the time since the last change among the partitions with calls in flight.

        So the seconds of all partitions add up to the time in which the stage was at work.
        """
        now, before = self._clock(), self._shared_at[stage]
        self._shared_at[stage] = now
        calls = sum(self._in_flight[stage].values())
        for partition, own in self._in_flight[stage].items():
            self._state.stats[partition, stage].seconds += (now - before) * own / calls

    def know(self, run: FragmentRun, stage: str, rows: int) -> None:
        """Takes in how many rows a stage gets for a fragment."""
        self._rows[stage].know(run.partition, run.index, rows)

    def add(self, run: FragmentRun, stage: str, kind: TaskKind, report: Report) -> bool:
        """Takes in the rows of a piece of work.

        Returns:
            Whether it tells how fast the stage is.
        """
        whole = kind == "whole" or (kind == "gather" and not run.nodes[stage].given_rows)
        if not whole and kind != "slice":
            return False
        stats, tally = self._state.stats[run.partition, stage], report.tally
        stats.rows_in += tally.rows_in
        stats.faults += tally.quarantined + tally.nulled
        if whole:
            self.know(run, stage, tally.rows_in)
        self._rows[stage].add(run.partition, tally.rows_in)
        return True

    def add_part(self, run: FragmentRun, stage: str, rows: int) -> None:
        """Takes in that a fragment's part of so many rows is written.

        Rows that the part takes from a former one were not computed by this run.
        """
        stats = self._state.stats[run.partition, stage]
        stats.computed += 1
        made = sum(made for _, made in run.nodes[stage].pieces.values())
        stats.rows_out += made if stage in run.mends else rows
        for name, node in run.nodes.items():
            if node.spec.upstream == (stage,):
                self.know(run, name, rows)

    def start_over(self, run: FragmentRun) -> None:
        """Takes back the rows of a fragment's slices, which are computed again."""
        for stage, node in run.nodes.items():
            if not node.done:
                stats = self._state.stats[run.partition, stage]
                stats.rows_in -= node.tally.rows_in
                stats.faults -= node.tally.quarantined + node.tally.nulled
                self._rows[stage].add(run.partition, -node.tally.rows_in)

    def found(self, partition: int, index: int, stage: str) -> None:
        """Takes in that a part that was to be computed is in the store: another run wrote it."""
        self._rows[stage].drop(partition, index)

    def tell(self, last: bool = False) -> None:
        """Tells how far the stages are, if it is time to.

        Args:
            last: Whether the wave is over: what is not computed now never is.
        """
        now = self._clock()
        if not last and now - self._told < _TOLD_SECONDS:
            return
        self._told = now
        if len(self._state.failed) > len(self._failed):
            for partition, stage in self._state.failed.keys() - self._failed:
                self._failed.add((partition, stage))
                if stage in self._rows:
                    self._rows[stage].give_up(partition)
        done = {stage: rows.done for stage, rows in self._rows.items()}
        total = done if last else {stage: rows.total for stage, rows in self._rows.items()}
        self._state.emit(Progress(done, dict(total), now - self._began))


def _expected(state: RunState, stage: str) -> StageRows:
    """The rows that a stage has to compute, as far as they are known."""
    rows, upstream = StageRows(), state.pipeline[stage].spec.upstream
    for index, partition in enumerate(state.plan.partitions):
        if (index, stage) in state.failed:
            continue
        above = state.parts.get((index, upstream[0]), {}) if len(upstream) == 1 else {}
        plan = partition.stages[stage]
        for i in plan.missing:
            rows.expect(index, i, partition.fragments[i].stop - partition.fragments[i].start)
            if i in plan.mends:
                rows.know(index, i, plan.mends[i].info.quarantined + plan.mends[i].info.nulled)
            elif i in above:
                rows.know(index, i, above[i].info.rows)
    return rows


_MOST_IDS = 6


class RowCounts:
    """Looks at each part that was written."""

    def __init__(self, state: RunState, requests: Requests) -> None:
        self._state, self._requests = state, requests
        self._pipeline = state.pipeline

    def violation(self, run: FragmentRun, spec: StageSpec, part: Part) -> VaneError | None:
        """What is wrong with a part's counts, for a part that its caller then removes."""
        info = part.info
        base = spec.base_node(self._pipeline)
        above = self._state.parts[run.partition, base][run.index] if base != SOURCE else None
        expected = above.info.rows if above else run.fragment.stop - run.fragment.start
        sample = self._state.plan.partitions[run.partition].sample
        expected = len(sample[run.index]) if sample else expected
        passed = info.rows_in - info.filtered - info.quarantined
        many = spec.makes_rows
        if (
            info.rows_in == expected
            and (info.rows >= passed if many else info.rows == passed)
            and (info.filtered == 0 or spec.may_filter)
        ):
            return None
        told = f"{info.rows_in} rows in of {expected}, {info.filtered} filtered, "
        ids = "" if above is None else self._missing_ids(spec, part, base, above)
        return IntegrityError(
            f"{self._requests.culprit(run, spec.name)}: {told}{info.quarantined} quarantined, "
            f"{info.rows} out{ids}; expected every row of {base!r} to be one of these. The part "
            "was removed; if what it reads was changed in the store by hand, materialize that "
            "again with force"
        )

    def too_many_faults(self, run: FragmentRun, stage: str, report: Report) -> VaneError | None:
        """The error of a stage of which more rows were set aside than it allows; else None.

        That is judged early by all rows that the source has, and in the end by the stage's check.
        """
        faults = self._state.stats[run.partition, stage].faults
        if faults <= self._state.most_faults(run.partition, stage):
            return None
        rows = self._state.plan.partitions[run.partition].source_rows
        return UdfError(
            f"{self._requests.culprit(run, stage)}: {faults} of at most {rows} rows of the "
            f"partition failed, more than max_error_rate allows. The last: "
            f"{'; '.join(report.faults)}"
        )

    def _missing_ids(self, spec: StageSpec, part: Part, base: str, above: Part) -> str:
        """Ids that are in what the part was made from and not in the part, or the reverse."""
        id = self._pipeline[base].id
        try:
            given = read_part(above.folder, above.info.name, [id]).column(id)
            found = read_part(part.folder, part.info.name).column(id)
        except (OSError, KeyError, VaneError):
            return ""
        differ = sorted(set(given.to_pylist()) ^ set(found.to_pylist()))
        return f" (ids {names(differ[:_MOST_IDS])})" if differ else ""
