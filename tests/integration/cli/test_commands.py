"""The command line as an operator or a script meets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("module", ["vane_dagster", "vane_dagster.cli.main"])
def test_the_package_runs_as_a_module(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, "cluster", "stop", "--name", "absent"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'absent'" in done.stdout
    assert "nothing to stop" in done.stdout
    wrong = subprocess.run([*command[:3], "nonsense"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert "No such command 'nonsense'" in wrong.stderr
