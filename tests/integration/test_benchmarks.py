"""The benchmarks as they are run: on the command line, with contenders that fail or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
