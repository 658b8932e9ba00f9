"""The benchmarks as they are run: on the command line, with contenders that fail or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import vane_dagster as vd
from benchmarks import contracts, harness, row_reuse
from benchmarks.harness import measure, prepare
from benchmarks.workloads import workload
from support.benchmark_runs import measures_the_bare_loop, skipping
from support.paths import REPOSITORY
from support.udf_calls import run_stage


def test_the_bare_loop_is_measured_verified_and_printed(tmp_path: Path) -> None:
    done = measures_the_bare_loop(tmp_path, "b", repeats=1)
    assert done.returncode == 0, done.stderr


def test_a_terminated_run_leaves_no_processes_and_no_folders(tmp_path: Path) -> None:
    arguments = ["--only", "b", "--repeat", "50", *skipping("raydata", "daft", "vane")]
    command = [sys.executable, "-m", "benchmarks", "--quick", "--temp", str(tmp_path)]
    process = subprocess.Popen([*command, *arguments], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("vb*/w/m/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("vb*"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running


def test_a_contender_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    bench = prepare(workload("b", quick=True), True, tmp_path)
    broken = harness.Contender("daft", "no_such_module", "pyarrow")
    measured = measure(bench, broken, 0)
    assert "Daft: its process ended with code 1" in measured.error
    assert "no_such_module" in measured.error


@pytest.mark.parametrize("name", contracts.PAIRS)
def test_a_contract_and_batches_compute_the_same(name: str) -> None:
    found = []
    for data, add in contracts.PAIRS[name]:
        rows = vd.Pipeline("rows", source=vd.parquet("rows.parquet"), id="id")
        output = run_stage(add(rows), contracts.tables(40)[data])
        found.append([np.asarray(value).ravel().tolist() for value in output["out"].to_pylist()])
        assert len(found[-1]) == 40 // contracts.SHARE[data]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("case", "rows", "calls"),
    [("changed", 400, 4), ("own", 400, 400), (row_reuse.BACKFILL, 1200, 400 + 2 * 8)],
)
def test_rows_that_a_change_affects_are_counted(
    case: str, rows: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(row_reuse.SEEN, "set by the benchmark")
    measured = row_reuse.measure(case, tmp_path / case, 400, 0, days=3)
    assert (measured.rows, measured.calls) == (rows, calls)
    assert calls <= measured.allowed


def test_the_day_after_is_computed_and_judged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.second_day", "--quick", "--only", "vane_local"]
    done = subprocess.run(
        [*command, "--repeat", "1", "--results", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("days-*.json")
    measured = json.loads(path.read_text())["workloads"]["days"]
    assert [one["verdict"]["right"] for one in measured] == [200, 200, 200]
    # Four changed rows and two new, of which two raise; the batch of the killed worker twice.
    first, second, third = (one["calls"] for one in measured)
    assert first == 200
    assert 6 < second < 20
    assert third > 202
    assert all(1 <= one["loads"] <= 3 for one in measured)
