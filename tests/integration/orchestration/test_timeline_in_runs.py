"""The timeline of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEFINITIONS = """
import os
import dagster as dg
import vane_dagster as vd

rows = vd.Pipeline("rows", source=vd.table({"id": [1, 2]}), id="id")
rows.project("twice", {"id": "id", "y": "id * 2"})
resources = {"compute": vd.LocalCompute(), "store": vd.FragmentStore(root=os.path.abspath("store"))}
defs = dg.Definitions(assets=[rows.build_assets()], resources=resources)
"""


def test_a_run_logs_its_timeline_on_request(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "rows.py").write_text(DEFINITIONS)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.setenv("VANE_DAGSTER_PROFILE", "1")
    run = [sys.executable, "-m", "dagster", "asset", "materialize", "-f", "rows.py"]
    done = subprocess.run([*run, "--select", "*"], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    timeline = done.stderr[done.stderr.index("timeline of the step") :]
    phases = ["launch of the step", "plan", "read, compute, write", "events in"]
    assert [phase for phase in phases if phase not in timeline] == []
