"""The benchmarks as they are run: on the command line, with contenders that fail or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import row_reuse
from benchmarks.harness import Contender, measure, prepare
from benchmarks.workloads import workload
from support.paths import REPOSITORY


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--quick", "--repeat", "1", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def skipping(*contenders: str) -> list[str]:
    return [word for contender in contenders for word in ("--skip", contender)]


def test_the_bare_loop_is_measured_verified_and_printed(tmp_path: Path) -> None:
    skipped = skipping("raydata", "vane", "daft")
    done = run("benchmarks", "--results", str(tmp_path), "--only", "b", *skipped)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| bare loop")]
    assert "| 1.00 |" in row, done.stderr
    assert f"{os.cpu_count()} cores" in done.stdout
    (path,) = tmp_path.glob("*.json")
    measured = json.loads(path.read_text())["workloads"]["b"]
    (one,) = [one for one in measured if one["contender"] == "bare"]
    work = workload("b", quick=True)
    assert len(one["seconds"]) == work.partitions * work.passes
    assert (one["repeat"], one["loads"], one["error"]) == (0, 2, "")

    # A contender that fails is named with its last line.
    broken = Contender("daft", "no_such_module", "pyarrow")
    error = measure(prepare(work, True, tmp_path), broken, 0).error
    assert "Daft: its process ended with code 1" in error
    assert "no_such_module" in error


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


@pytest.mark.parametrize(
    ("case", "rows", "calls"),
    [("changed", 400, 4), (row_reuse.BACKFILL, 1200, 400 + 2 * 8)],
)
def test_rows_that_a_change_affects_are_counted(
    case: str, rows: int, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(row_reuse.SEEN, "set by the benchmark")
    measured = row_reuse.measure(case, tmp_path / case, 400, 0, days=3)
    assert (measured.rows, measured.calls) == (rows, calls)
    assert calls <= measured.allowed


def test_the_day_after_is_computed_and_judged(tmp_path: Path) -> None:
    run("benchmarks.second_day", "--only", "vane_local", "--results", str(tmp_path))
    (path,) = tmp_path.glob("days-*.json")
    measured = json.loads(path.read_text())["workloads"]["days"]
    assert [one["verdict"]["right"] for one in measured] == [200, 200, 200]
    # Four changed rows and two new, of which two raise; the batch of the killed worker twice.
    first, second, third = (one["calls"] for one in measured)
    assert first == 200
    assert 6 < second < 20
    assert third > 202
    assert all(1 <= one["loads"] <= 3 for one in measured)
