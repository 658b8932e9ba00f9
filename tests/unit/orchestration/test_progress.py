"""Progress and the summary in the run's log."""

from __future__ import annotations

import contextlib
import queue
from types import SimpleNamespace

import pytest

import vane_dagster as vd
from vane_dagster._texts import duration, rate
from vane_dagster.engine.accounting import StageRows
from vane_dagster.events import (
    Committed,
    Failed,
    Noticed,
    Progress,
    RunPlanned,
    StageStats,
    Unchanged,
    Waiting,
    WorkerReady,
)
from vane_dagster.orchestration.progress import ProgressReport, RunSummary
from vane_dagster.orchestration.reporting import RunReport
from vane_dagster.orchestration.run import EventQueue
from vane_dagster.planning.plan import RunPlan
from vane_dagster.worker.reports import LoadReport


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """What a `ProgressReport` logs, one time for each call, as ten seconds pass between them."""

    def __init__(self) -> None:
        self.clock, self.lines = Clock(), []
        self.report = ProgressReport(self.lines.append, self.clock)

    def at(self, seconds: float, done: int, total: int) -> list[str]:
        """The lines that are logged for rows done of all so many seconds after the start."""
        self.lines.clear()
        self.clock.now += 10
        self.report(Progress({"embedding": done}, {"embedding": total}, seconds))
        return list(self.lines)


# Lines


def test_a_line_has_rows_rate_and_time_left():
    log = Log()
    log.at(11, 5, 100)
    assert log.at(15, 25, 100) == ["embedding: 25 of 100 rows (25%), 5.0 rows/s, 15 s left"]


def test_the_rate_is_that_of_the_last_30_seconds():
    log = Log()
    for seconds in range(1, 101):
        log.at(seconds, 1000 * seconds, 1_000_000)
    for seconds in range(101, 131):
        lines = log.at(seconds, 100_000 + 10 * (seconds - 100), 1_000_000)
    assert lines == ["embedding: 100,300 of 1,000,000 rows (10%), 10 rows/s, 1 d 0 h left"]


def test_the_time_in_which_the_model_is_loaded_does_not_count():
    log = Log()
    for seconds in range(1, 20):
        assert log.at(seconds, 0, 100) == []
    log.at(20, 10, 100)
    assert log.at(25, 20, 100) == ["embedding: 20 of 100 rows (20%), 2.0 rows/s, 40 s left"]


def test_below_5_percent_there_is_no_time_left():
    log = Log()
    log.at(1, 1, 1000)
    assert log.at(6, 49, 1000) == ["embedding: 49 of 1,000 rows (4%), 9.6 rows/s"]
    assert log.at(12, 50, 1000) == ["embedding: 50 of 1,000 rows (5%), 4.5 rows/s, 3 min 33 s left"]


def test_a_stage_without_rows_for_15_seconds_has_no_time_left():
    log = Log()
    log.at(1, 10, 100)
    log.at(2, 50, 100)
    assert log.at(16, 50, 100)[0].endswith(" left")
    assert log.at(17, 50, 100) == ["embedding: 50 of 100 rows (50%), no rows for 15 s"]


def test_a_stage_that_does_not_begin_is_mentioned_after_30_seconds():
    log = Log()
    assert log.at(29, 0, 100) == []
    assert log.at(40, 0, 100) == ["embedding: 0 of 100 rows (0%), no rows for 40 s"]


def test_a_second_wave_begins_anew():
    log = Log()
    log.at(50, 90, 100)
    assert log.at(1, 0, 10) == []
    assert log.at(11, 5, 10) == ["embedding: 5 of 10 rows (50%)"]


def test_lines_are_five_seconds_apart():
    log = Log()
    log.at(1, 10, 100)
    log.clock.now -= 6
    assert log.at(2, 20, 100) == []
    assert log.at(3, 30, 100) != []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "40 ms"),
        (6.31, "6.3 s"),
        (9.97, "10 s"),
        (200, "3 min 20 s"),
        (3600, "1 h 0 min"),
        (100_000, "1 d 3 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_slow_rates_are_not_rounded_to_zero():
    assert [rate(r) for r in (0.25, 4.23, 1234.5)] == ["0.25 rows/s", "4.2 rows/s", "1,234 rows/s"]


# Totals


def test_a_total_follows_the_filter_above_and_ends_exact():
    rows = StageRows()
    for fragment in range(10):
        rows.expect(0, fragment, 100)
    assert rows.total == 1000
    rows.set_input_rows(0, 0, 10)
    assert rows.total == 100
    rows.set_input_rows(0, 1, 30)
    assert rows.total == 200
    for fragment in range(2, 10):
        rows.set_input_rows(0, fragment, 7)
    rows.done = 96
    assert (rows.done, rows.total) == (96, 96)


def test_a_fragment_that_is_dropped_leaves_the_total():
    rows = StageRows()
    for fragment in range(3):
        rows.expect(0, fragment, 100)
    rows.set_input_rows(0, 0, 50)
    rows.drop(0, 0)
    rows.drop(0, 1)
    assert rows.total == 100


def test_progress_and_log_lines_overtake_results():
    events = EventQueue()
    result = Unchanged("clean", None, None)
    progress = Progress({}, {}, 1.0)
    for event in (result, None, result, progress, Noticed("a")):
        events.put(event)

    assert [events.get(0) for _ in range(5)] == [progress, Noticed("a"), result, result, None]
    with pytest.raises(queue.Empty):
        events.get(0.01)


# The summary


def test_the_summary_adds_up_what_was_done():
    clock = Clock()
    summary = RunSummary(clock=clock)

    def parts(*quarantined):
        return SimpleNamespace(parts=[SimpleNamespace(quarantined=n) for n in quarantined])

    ready = ("embedding",), "Model", "w"
    summary.take(WorkerReady(*ready, LoadReport(False, 6.3, 1, "cpu", "host")))
    summary.take(WorkerReady(*ready, LoadReport(True, 6.3, 2, "cpu", "host")))
    stats = StageStats(computed=2, rows_out=900, seconds=3.0, work_seconds=5.7, call_seconds=5.3)
    summary.take(Committed("embedding", "a", None, parts(0, 3, 0), stats))
    summary.take(Committed("embedding", "b", None, parts(0), StageStats()))
    stored = SimpleNamespace(stage="embedding", rows=4000, parts=parts(*range(2), *[0] * 10).parts)
    summary.up_to_date(stored)
    function = ("embedding",), "clean", "w", LoadReport(False, 17.0, 1, "cpu", "host")
    summary.take(WorkerReady(*function, is_function=True))
    summary.take(Failed("embedding", "d", vd.errors.UdfError("no")))
    clock.now = 75.0

    assert summary.text().splitlines() == [
        "finished in 1 min 15 s",
        "  embedding: partitions: 2 committed, 1 up to date (4,000 rows in 12 fragments), "
        "1 failed; "
        "900 rows in 3.0 s, 300 rows/s; 1.9 workers busy, 93% of it in your code; "
        "fragments: 2 computed, 2 reused; 4 rows quarantined",
        "  model Model: 1 load in 6.3 s, 1 warm worker",
        "  function clean: 1 worker start in 17 s, 0 warm workers",
    ]


def test_the_summary_of_copied_rows_has_no_rate():
    summary = RunSummary()
    stats = StageStats(computed=1, copied=100, seconds=0.02)
    summary.take(Committed("embedding", "a", None, SimpleNamespace(parts=[]), stats))
    (line,) = summary.text().splitlines()[1:]
    assert line == (
        "  embedding: partitions: 1 committed; fragments: 1 computed, 0 reused; "
        "input rows: 0 computed, 100 copied"
    )


@pytest.mark.parametrize(
    ("error", "ended"), [(None, "finished in"), (KeyboardInterrupt, "stopped")]
)
def test_a_run_that_is_interrupted_is_summed_up_too(tmp_path, error, ended):
    lines: list[str] = []
    context = SimpleNamespace(
        log=SimpleNamespace(info=lines.append),
        retry_number=0,
        selected_asset_keys=set(),
        instance=SimpleNamespace(event_log_storage=None),
        assets_def=SimpleNamespace(specs=()),
    )
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path)), id="id")
    report = RunReport(context, None, pipeline, None, [None], None)
    plan = RunPlan(pipeline, (), (), {}, {}, "", None)
    with contextlib.suppress(KeyboardInterrupt), report:
        report.listen(RunPlanned(plan))
        report.listen(Waiting("fragments", "waiting for run b", ("b",)))
        if error:
            raise error
    assert [line.startswith(ended) for line in lines] == [False, True]
