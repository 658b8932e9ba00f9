"""What a run reports, from the engine's events alone."""

from __future__ import annotations

from support.counted_runs import Clock, counts, fragment
from vane_dagster.errors import VaneError
from vane_dagster.events import Failed, Progress
from vane_dagster.orchestration.reporting import failure_message
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.worker.reports import Tally, WorkReport


def test_slices_of_a_fragment_that_starts_over_are_taken_back():
    events: list = []
    counted, stats = counts(Clock(), events)
    half = Tally(rows_in=50, quarantined=2)
    counted.add(fragment(0), "a", "slice", WorkReport(tally=half))
    counted.start_over(fragment(0, half))
    counted.add(fragment(0), "a", "slice", WorkReport(tally=Tally(rows_in=100, quarantined=3)))
    counted.emit_progress(last=True)

    assert (stats[0, "a"].rows_in, stats[0, "a"].faults) == (100, 3)
    assert events[0].done == {"a": 100}


def test_the_last_progress_is_complete_whatever_was_given_up():
    events: list[Progress] = []
    counted, _ = counts(Clock(), events)
    counted.add(fragment(0), "a", "slice", WorkReport(tally=Tally(rows_in=40)))
    counted.emit_progress(last=True)

    assert events[0].done == events[0].total == {"a": 40}


def test_rows_that_the_code_made_are_counted_and_those_of_copies_are_not():
    counted, stats = counts(Clock(), [])
    run = fragment(0)
    counted.add(run, "a", "whole", WorkReport(tally=Tally(rows_in=40), rows_out=39))
    counted.add_part(run, run.task_states["a"], PartInfo("key", "digest", 1000, 1, copied=961))

    assert (stats[0, "a"].rows_in, stats[0, "a"].rows_out, stats[0, "a"].copied) == (40, 39, 961)


def test_the_error_of_a_partition_is_masked_wherever_it_is_reported():
    """That of the driver too, as of its store."""
    error = VaneError("stage 'docs/m': s3://key:hidden-secret@bucket/part is gone")
    assert "***@bucket" in failure_message(Failed("m", "a", error))
