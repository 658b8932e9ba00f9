"""Runs of the benchmarks on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.workloads import workload
from support.paths import REPOSITORY


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--results", str(tmp_path)]
    return subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True)


def skipping(*contenders: str) -> list[str]:
    return [word for contender in contenders for word in ("--skip", contender)]


def measures_the_bare_loop(tmp_path: Path, key: str) -> None:
    """Run the bare loop of a workload twice, and check the table and the results file."""
    done = run(tmp_path, "--only", key, "--repeat", "2", *skipping("raydata", "daft", "vane"))
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| bare loop")]
    assert "| 1.00 |" in row
    assert f"{os.cpu_count()} cores" in done.stdout
    (path,) = tmp_path.glob("*.json")
    measured = json.loads(path.read_text())["workloads"][key]
    work = workload(key, quick=True)
    assert [one["repeat"] for one in measured] == [0, 1]
    for one in measured:
        assert len(one["seconds"]) == work.partitions * work.passes
        assert one["loads"] == 2
        assert one["error"] == ""
