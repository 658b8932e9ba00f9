"""Runs of the benchmarks on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.workloads import workload
from support.paths import REPOSITORY


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--results", str(tmp_path)]
    return subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True)


def skipping(*contenders: str) -> list[str]:
    return [word for contender in contenders for word in ("--skip", contender)]


def measures_the_bare_loop(
    tmp_path: Path, key: str, *arguments: str, repeats: int = 2, skip: Sequence[str] = ("daft",)
) -> subprocess.CompletedProcess[str]:
    """Run the bare loop of a workload, and check the table and the results file."""
    skipped = skipping("raydata", "vane", *skip)
    done = run(tmp_path, "--only", key, "--repeat", str(repeats), *skipped, *arguments)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| bare loop")]
    assert "| 1.00 |" in row, done.stderr
    assert f"{os.cpu_count()} cores" in done.stdout
    (path,) = tmp_path.glob("*.json")
    measured = json.loads(path.read_text())["workloads"][key]
    bare = [one for one in measured if one["contender"] == "bare"]
    work = workload(key, quick=True)
    assert [one["repeat"] for one in bare] == list(range(repeats))
    for one in bare:
        assert len(one["seconds"]) == work.partitions * work.passes
        assert one["loads"] == 2
        assert one["error"] == ""
    return done
