"""What a run logs: progress, workers, errors and a summary."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from support.counted_runs import Clock
from vane_dagster._texts import duration, rate
from vane_dagster.engine.committer import BlockedError
from vane_dagster.events import (
    Committed,
    Connected,
    Failed,
    Noticed,
    PoolTime,
    Progress,
    RunPlanned,
    StageStats,
    Unchanged,
    WaveStarted,
    WorkerReady,
)
from vane_dagster.orchestration.progress import ProgressReport, RunSummary
from vane_dagster.orchestration.reporting import RunReport
from vane_dagster.orchestration.resources import command_option
from vane_dagster.planning.plan import RunPlan
from vane_dagster.servers.launch import Endpoint, ServerStatus
from vane_dagster.storage.manifest import CheckResult
from vane_dagster.worker.reports import Fault, LoadReport


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


@pytest.mark.parametrize(
    ("before", "at", "line"),
    [
        ([(11, 5)], (15, 25), "25 of 100 rows (25%), 5.0 rows/s, 15 s left"),
        ([(1, 1)], (6, 4), "4 of 100 rows (4%), 0.60 rows/s"),
        ([(1, 10), (6, 50)], (35, 50), "50 of 100 rows (50%), 8.0 rows/s, 6.2 s left"),
        ([(1, 10), (6, 50)], (36, 50), "50 of 100 rows (50%), no rows for 30 s"),
        ([], (29, 0), None),
        ([], (40, 0), "0 of 100 rows (0%), no rows for 40 s"),
    ],
)
def test_a_line_has_rows_rate_and_time_left(before, at, line):
    log = Log()
    for seconds, done in before:
        log.at(seconds, done, 100)
    assert log.at(*at, 100) == ([f"embedding: {line}"] if line else [])


def test_a_second_wave_begins_anew_and_lines_are_five_seconds_apart():
    log = Log()
    log.at(50, 90, 100)
    assert log.at(1, 0, 10) == []
    assert log.at(11, 5, 10) == ["embedding: 5 of 10 rows (50%)"]
    log.clock.now -= 6
    assert log.at(12, 6, 10) == []
    assert log.at(13, 7, 10) != []


def test_durations_and_slow_rates():
    seconds = [0.04, 9.97, 200, 3600, 100_000]
    texts = ["40 ms", "10 s", "3 min 20 s", "1 h 0 min", "1 d 3 h"]
    assert [duration(each) for each in seconds] == texts
    assert [rate(r) for r in (0.25, 4.23, 1234.5)] == ["0.25 rows/s", "4.2 rows/s", "1,234 rows/s"]


# The summary


def parts(*quarantined):
    made = [SimpleNamespace(quarantined=n) for n in quarantined]
    return SimpleNamespace(parts=made, figures={})


def test_the_summary_adds_up_what_was_done():
    clock = Clock()
    summary = RunSummary(clock=clock)

    ready = ("embedding",), "Model", "w"
    clock.now = 0.5
    summary.take(RunPlanned(RunPlan(None, (), (), {}, {}, "", None)))
    clock.now = 14.0
    summary.take(Connected())
    summary.take(WorkerReady(*ready, LoadReport(False, 6.3, 1, "cpu", "host")))
    summary.take(WorkerReady(*ready, LoadReport(True, 6.3, 2, "cpu", "host")))
    stats = StageStats(computed=2, rows_in=900, seconds=3.0, work_seconds=5.7, call_seconds=5.3)
    summary.take(Committed("embedding", "a", None, parts(0, 3, 0), stats))
    summary.take(Committed("embedding", "b", None, parts(0), StageStats(copied=100)))
    stored = SimpleNamespace(stage="embedding", rows=4000, parts=parts(*range(2), *[0] * 10).parts)
    summary.take(Unchanged("embedding", "c", None, stored))
    function = ("embedding",), "clean", "w", LoadReport(False, 17.0, 1, "cpu", "host")
    summary.take(WorkerReady(*function, is_function=True))
    summary.take(WaveStarted(1, 1, ("embedding",), ("Model",), {"GPU": 2.0}))
    io = PoolTime((), True, 2, computing=10.0, input=140.0)
    pool = PoolTime(
        ("embedding",), False, 2, {"GPU": 1.0}, computing=120.0, input=15.0, loading=15.0
    )
    summary.take(Progress({}, {}, 75.0, (io, pool)))
    clock.now = 75.0
    advice = (
        "bottleneck: 'embedding', whose 2 workers computed 80% of the time. Predicted: the run is "
        "2.5 times as fast with concurrency=8 instead of 2, which needs 6 GPU more than there are"
    )

    assert summary.text().splitlines() == [
        "finished in 1 min 15 s, plan 0.5 s, connection 14 s, first worker 0 ms",
        "  embedding: partitions: 2 committed, 1 up to date (4,000 rows in 12 fragments); "
        "1,000 rows (900 computed, 100 copied) in 3.0 s, 333 rows/s; "
        "2 workers: computing 80%, waiting for input 10%, loading 10%; "
        "93% of the computing time in your code; fragments: 2 computed, 2 reused; "
        "4 rows quarantined",
        "  model Model: 1 started in 6.3 s, 1 warm",
        "  function clean: 1 started in 17 s, 0 warm",
        f"  {advice}",
    ]
    assert "bottleneck" not in summary.text(finished=False)
    assert summary.figures(finished=False)["advice"] is None
    summary.take(Failed("embedding", "d", vd.errors.UdfError("no")))
    assert "(4,000 rows in 12 fragments), 1 failed; 1,000 rows" in summary.text()
    assert "bottleneck" not in summary.text()
    assert summary.figures()["advice"] is None


def test_the_summary_counts_retries_and_those_after_a_rate_limit():
    summary = RunSummary(clock=Clock())
    for some in ({"retries": 29, "rate_limited": 20}, {"retries": 3, "rate_limited": 0}):
        stats = StageStats(computed=1, rows_in=9, seconds=3.0, **some)
        summary.take(Committed("asked", "a", None, parts(0), stats))
    assert "; 32 calls retried, 20 of them after HTTP 429; " in summary.text()
    summary = RunSummary(clock=Clock())
    summary.take(Committed("asked", "a", None, parts(0), StageStats(retries=1)))
    assert "; 1 call retried; " in summary.text()


@pytest.mark.parametrize(
    ("stats", "limit"),
    [
        ({"rows_in": 900, "seconds": 60.0}, "their requests_per_minute"),
        ({"rows_in": 700, "retries": 200, "seconds": 60.0}, "their requests_per_minute"),
        ({"rows_in": 700, "seconds": 60.0}, ""),
        ({"rows_in": 700, "retries": 60, "rate_limited": 60, "seconds": 60.0}, ""),
        ({"rows_in": 80, "retries": 20, "rate_limited": 20, "seconds": 60.0}, "(HTTP 429)"),
        (
            {"rows_in": 9, "seconds": 60.0, "spent": Counter(prompt_tokens=9e4)},
            "their tokens_per_minute",
        ),
    ],
)
def test_the_summary_names_what_limits_the_requests_of_the_slowest_pool(stats, limit):
    summary = RunSummary(clock=(clock := Clock()))
    per_minute = {"requests_per_minute": 1000.0, "tokens_per_minute": 100_000.0}
    asked = SimpleNamespace(spec=SimpleNamespace(usage=SimpleNamespace(per_minute=per_minute)))
    plan = RunPlan({"asked": asked}, ("asked",), (), {}, {}, "", None)
    summary.take(RunPlanned(plan))
    summary.take(WaveStarted(1, 1, ("asked",), ("Model",), {"CPU": 2.0}))
    summary.take(Progress({}, {}, 75.0, (PoolTime(("asked",), False, 2, computing=120.0),)))
    summary.take(Committed("asked", "a", None, parts(0), StageStats(computed=1, **stats)))
    clock.now = 75.0
    text = summary.text()
    assert f"computed 100% of the time{', limited by ' * bool(limit)}" in text
    assert limit in text


def test_the_summary_has_the_stages_in_the_order_of_the_plan():
    summary = RunSummary(clock=Clock())
    plan = RunPlan(None, ("clean", "asked", "joined"), (), {}, {}, "", None)
    summary.take(RunPlanned(plan))
    for stage in ("joined", "clean", "asked"):
        summary.take(Failed(stage, "a", vd.errors.ComputeError("no luck")))
    lines = [line.split(":")[0].strip() for line in summary.text().splitlines()[1:]]
    assert lines == [*plan.selected]


@pytest.mark.parametrize(("grouped", "shown"), [("separate", True), ("group", False)])
def test_the_summary_advises_to_group_small_files(tmp_path, grouped, shown):
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path), small_files=grouped), id="id")
    docs.map_batches("f", lambda batch: batch, schema={"x": "BIGINT"})
    files = [SimpleNamespace(rows=3)] * 100
    stages = {"f": SimpleNamespace(missing=range(100))}
    each: Any = SimpleNamespace(fragments=files, stages=stages, source_rows=300)
    clock = Clock()
    summary = RunSummary(clock=clock)
    rule: Any = SimpleNamespace(rows=4096)
    summary.take(RunPlanned(RunPlan(docs, ("f",), (each,), {}, {}, rule, docs.source)))
    summary.take(WaveStarted(1, 1, ("f",), ("f",), {"CPU": 2.0}, True))
    pool = PoolTime(("f",), workers=2, computing=40.0)
    summary.take(Progress({}, {}, 25.0, (PoolTime((), True, 1, computing=5.0), pool)))
    stats = StageStats(computed=100, rows_in=9, work_seconds=40.0, call_seconds=1.0)
    summary.take(Committed("f", None, None, parts(0), stats))
    clock.now = 25.0
    assert ('as fast with small_files="group"' in summary.text()) == shown
    assert "concurrency" not in summary.text()


@pytest.mark.parametrize(
    ("figures", "cost"), [({"cost_spent": 0.00841}, ", a cost of 0.0168"), ({}, "")]
)
def test_the_summary_has_the_tokens_and_the_cost_of_a_prompt(figures, cost):
    summary = RunSummary()
    spent = Counter(requests=300, prompt_tokens=8_000, completion_tokens=1_000, cached_tokens=500)
    for key in ("a", "b"):
        manifest: Any = SimpleNamespace(parts=[], figures=figures)
        summary.take(Committed("answer", key, None, manifest, StageStats(spent=spent)))
    assert f"2 committed; 600 requests, 18,000 tokens{cost}; frag" in summary.text()


# The report


def reporting(
    log: list[str], tmp_path: Any, partitions: Any = (None,), option: str = ""
) -> RunReport:
    """The report of a run that appends what it logs."""
    context = SimpleNamespace(
        log=SimpleNamespace(info=log.append, error=log.append),
        log_event=lambda event: None,
        run=SimpleNamespace(run_id="3f9c21aa-and-more"),
        selected_asset_keys=set(),
        instance=SimpleNamespace(event_log_storage=None),
        assets_def=SimpleNamespace(specs=()),
    )
    pipeline = vd.Pipeline("docs", source=vd.parquet(str(tmp_path)), id="id")
    pipeline.map_batches("a", lambda batch: batch, schema={"x": "BIGINT"})
    report = RunReport(
        context, SimpleNamespace(blocked=[], outputs=list), pipeline, None, partitions, option
    )
    report.listen(RunPlanned(RunPlan(pipeline, (), (), {}, {}, "", None)))
    return report


@pytest.mark.parametrize(
    ("error", "ended"), [(None, "finished in"), (KeyboardInterrupt, "stopped")]
)
def test_a_run_that_is_interrupted_is_summed_up_too(tmp_path, error, ended):
    lines: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), reporting(lines, tmp_path) as report:
        report.listen(Noticed("waiting for run b", False))
        if error:
            raise error
    assert [line.startswith(ended) for line in lines] == [False, True]


def test_a_load_and_the_first_warm_worker_are_logged(tmp_path):
    lines: list[str] = []
    report = reporting(lines, tmp_path)
    for warm in (False, True, True):
        report.listen(WorkerReady(("a",), "Model", "w", LoadReport(warm, 6.3, 1, "cpu", "host")))
    loaded = "Model loaded in 6.3 s (worker w, pid 1, cpu)"
    assert lines == [loaded, "Model is warm (worker w, pid 1, cpu)"]


@pytest.mark.parametrize(
    ("node_id", "log"),
    [("host", "/its.log, until it stops"), ("ray-node", "`vane-dagster pools logs llm`")],
)
def test_a_server_is_logged_with_its_place_and_how_to_read_its_log(tmp_path, node_id, log):
    lines: list[str] = []
    endpoint = Endpoint("http://127.0.0.1:1", node="host", node_id=node_id)
    status = ServerStatus("ready", endpoint, log_path="/its.log")
    load = LoadReport(False, 6.3, 1, "cpu", "host", server=status)
    reporting(lines, tmp_path).listen(WorkerReady(("a",), "server llm", "w", load, server="llm"))
    assert lines == [
        f"server llm started in 6.3 s at http://127.0.0.1:1 (worker w, node host). Its log: {log}"
    ]


def test_the_failure_has_the_first_five_errors_in_full_and_the_log_the_others(tmp_path):
    lines: list[str] = []
    report = reporting(lines, tmp_path, option=command_option(vd.RayCompute(address="head:1")))
    report.listen(WaveStarted(1, 1, ("a",), ("Model",)))
    for number in range(7):
        report.listen(Failed("a", None, vd.errors.UdfError(f"error {number}\n\nframes")))
    frames = [""] * 5 + ["\n\nframes"] * 2
    assert lines == [f"stage 'docs/a': error {n}{each}" for n, each in enumerate(frames)]
    with pytest.raises(dg.Failure) as raised:
        list(report.results())
    assert raised.value.description.count("frames") == 5
    logs = "Output of the workers: `vane-dagster logs 3f9c21aa docs/a --address head:1`"
    assert raised.value.description.endswith(f"The log has 2 more errors\n\n{logs}")


@pytest.mark.parametrize(
    ("errors", "retried"),
    [
        ([vd.errors.SchemaError("x")], False),
        ([vd.errors.CodeIdentityError("x"), vd.errors.BudgetError("y")], False),
        ([vd.errors.BudgetError("x"), vd.errors.StoreError("y")], True),
        ([vd.errors.UdfError("x")], True),
        ([Fault("UdfError", "x", is_permanent=True).error()], False),
        ([], False),  # blocking checks alone
    ],
)
def test_dagster_retries_a_step_unless_all_causes_are_permanent(tmp_path, errors, retried):
    report = reporting([], tmp_path)
    for error in errors:
        report.listen(Failed("a", None, error))
    report._checks.blocked.append(
        ("a", None, CheckResult("golden", False, True, "ERROR", "1 row differs", {}, ""))
    )
    with pytest.raises(dg.Failure) as raised:
        list(report.results())
    assert raised.value.allow_retries == retried


def test_the_failure_has_the_failed_blocking_checks_too(tmp_path):
    report = reporting([], tmp_path, partitions=["x", "y", "z"])
    report.listen(Failed("a", "z", vd.errors.UdfError("no row")))
    failed = CheckResult("golden", False, True, "ERROR", "1 row differs", {}, "")
    report._checks.blocked.append(("a", "x", failed))
    with pytest.raises(dg.Failure) as raised:
        list(report.results())
    assert raised.value.description == (
        "2 of 3 partitions failed ('x', 'z'). Finished parts are kept.\n\n"
        "stage 'docs/a', partition 'z': no row\n\n"
        "blocking checks: 1 failed\n    stage 'a', partition 'x': golden failed: 1 row differs"
    )


@pytest.mark.parametrize(
    "error",
    [
        vd.errors.SourceError("no file for partition 'b'"),
        vd.errors.StoreError("permission is denied"),
        BlockedError("a", SimpleNamespace(name="rows", description="too few"), None),
    ],
)
def test_an_error_that_no_worker_causes_names_no_log_of_workers(tmp_path, error):
    report = reporting([], tmp_path)
    report.listen(WaveStarted(1, 1, ("a",), ("Model",)))
    report.listen(Failed("a", None, error))
    with pytest.raises(dg.Failure, match=str(error)[:20]) as raised:
        list(report.results())
    assert "vane-dagster logs" not in raised.value.description


@pytest.mark.parametrize(
    ("cluster", "option"),
    [
        ({}, ""),
        ({"cluster": vd.LocalCluster()}, ""),
        ({"cluster": vd.LocalCluster(name="gpus")}, " --name gpus"),
        ({"address": "ray://head:1"}, " --address ray://head:1"),
    ],
)
def test_a_command_names_the_cluster_of_the_run(cluster, option):
    assert command_option(vd.RayCompute(**cluster)) == option
    assert command_option(vd.LocalCompute()) == ""


def test_no_logs_are_named_if_no_worker_ran(tmp_path):
    report = reporting([], tmp_path)
    report.listen(Failed("a", None, vd.errors.SourceError("no such folder")))
    with pytest.raises(dg.Failure) as raised:
        list(report.results())
    assert raised.value.description == "stage 'docs/a': no such folder"


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        ("bc", "2 of 2 partitions failed ('b', 'c'). Finished"),
        ("b", "1 of 2 partitions failed ('b'). Finished"),
    ],
)
def test_the_failure_says_how_many_partitions_failed(failed, said, tmp_path):
    report = reporting([], tmp_path, "bc")
    for key in failed:
        report.listen(Failed("a", key, vd.errors.UdfError("no")))
    with pytest.raises(dg.Failure) as raised:
        list(report.results())
    assert raised.value.description.startswith(said)
