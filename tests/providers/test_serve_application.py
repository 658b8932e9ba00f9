"""`vd.ServeApplication` on a real Ray Serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import vane_dagster as vd
from support.serve import serve_python as serve_python

pytest.importorskip("fastapi", reason="the application is one of fastapi, which vLLM brings")


def test_an_application_is_shared_by_runs_adopted_and_deleted(serve_python, tmp_path: Path):
    home = tempfile.mkdtemp(prefix="vsv-", dir="/tmp")
    env = {**os.environ, "VANE_DAGSTER_HOME": home}
    command = [serve_python, "-m", "support.serve_runs", str(tmp_path)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=240, check=False
        )
    finally:
        stop = [serve_python, "-m", "vane_dagster.cli.main", "cluster", "stop"]
        subprocess.run(stop, env=env, capture_output=True, check=False)
        shutil.rmtree(home, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["successes"] == [True] * 3
    assert found["texts"] == sorted(f"ROW {number}!" for number in range(20))
    first, second, third = found["pids"]
    assert first == second == third, "its replicas are those of the first run"
    (own,) = found["applications"][0]
    assert own.startswith("shouter-")
    assert found["applications"][2] == sorted([own, "of another"])
    assert found["left"] == ["of another"]


def test_without_a_cluster_it_is_refused(tmp_path, materialize, local):
    from support.server_runs import asking

    llm = vd.ServeApplication("support.serve_app:app")
    result = materialize(asking(tmp_path / "src", llm), local, raises=False)
    assert not result.success
    text = str(next(e for e in result.all_events if e.is_step_failure).step_failure_data.error)
    assert "needs a Ray cluster" in text
