"""A run that is interrupted has an event for each manifest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import dagster as dg
from click.testing import CliRunner

from support.event_world import KEYS, STAGES, materializations
from support.paths import TESTS
from vane_dagster.cli.main import main


def test_an_interrupted_run_has_an_event_for_each_manifest(tmp_path, monkeypatch):
    (tmp_path / "dagster.yaml").touch()
    code = (
        f"from support.event_world import Path, run_of_a_process as r; r(Path({str(tmp_path)!r}))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def in_force() -> set[tuple[str, str]]:
        found = (tmp_path / "store" / "docs").glob("*/manifests/*/*.json")
        return {(path.parts[-4], path.parts[-2]) for path in found}

    try:
        until = time.monotonic() + 120
        while len(in_force()) < 4 and time.monotonic() < until:
            assert run.poll() is None, "the run ended early"
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        run.wait(60)
    finally:
        run.kill()
    committed = in_force()
    assert 4 <= len(committed) < len(KEYS) * len(STAGES)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        reported = {(s, key) for s in STAGES for key in materializations(instance, s)}
        (run_id,) = instance.get_run_ids()
    assert reported == committed

    # The table of what was done is among the run's events.
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    shown = CliRunner().invoke(main, ["advise", run_id]).output
    for stage in STAGES:
        if done := sum(name == stage for name, _ in committed):
            assert f"| {stage} | {done} committed" in shown, shown
