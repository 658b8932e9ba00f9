"""No row is lost, invented or there twice: each part's counts against what it was made from.

Ids are checked where they are read and where a user's code returns them. This is the check of our
own work: that all of a fragment's rows went through.
"""

from __future__ import annotations

from vane_dagster.engine.fragment_state import FragmentRun
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.tasks import Requests
from vane_dagster.errors import IntegrityError, UdfError, VaneError, names
from vane_dagster.events import Noticed
from vane_dagster.pipeline.specs import SOURCE, StageSpec
from vane_dagster.planning.plan import Part
from vane_dagster.storage.part_file import read_part
from vane_dagster.worker.protocol import Report

_MOST_IDS = 6


class RowCounts:
    """Looks at each part that was written."""

    def __init__(self, state: RunState, requests: Requests) -> None:
        self._state, self._requests = state, requests
        self._pipeline = state.pipeline

    def violation(self, run: FragmentRun, spec: StageSpec, part: Part) -> VaneError | None:
        """What is wrong with a part's counts; it is removed then, so that nothing builds on it."""
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
        part.folder.delete([info.name])
        return IntegrityError(
            f"{self._requests.culprit(run, spec.name)}: {told}{info.quarantined} quarantined, "
            f"{info.rows} out{ids}; expected every row of {base!r} to be one of these. The part "
            "was removed; if what it reads was changed in the store by hand, materialize that "
            "again with force"
        )

    def too_many_faults(self, run: FragmentRun, stage: str, report: Report) -> VaneError | None:
        """Tells of rows that were set aside; the error, where they are more than the stage allows.

        That is judged early by all rows that the source has, and in the end by the stage's check.
        """
        told, culprit = "; ".join(report.faults), self._requests.culprit(run, stage)
        faults = self._state.stats[run.partition, stage].faults
        if faults <= self._state.most_faults(run.partition, stage):
            self._state.emit(Noticed(f"{culprit}: some rows failed: {told}"))
            return None
        rows = self._state.plan.partitions[run.partition].source_rows
        return UdfError(
            f"{culprit}: {faults} of at most {rows} rows of the partition failed, more than "
            f"max_error_rate allows. The last: {told}"
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
