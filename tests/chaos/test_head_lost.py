"""The cluster's head is gone in the middle of a run: the step fails by an error of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.data import write_source
from support.paths import TESTS
from support.pool_models import until
from support.pools_process import MODELS
from vane_dagster.compute import head_watch
from vane_dagster.compute.local_head import Head, LocalHead

SETTINGS = {"name": "lost", "num_cpus": 2}

DRIVER = """
import json, sys
import dagster as dg
sys.path.insert(0, sys.argv[2])
from support import pools_run
options = json.loads(sys.argv[1])
sys.path.insert(0, options["models"])
docs = pools_run.pipeline(options)
with dg.DagsterInstance.ephemeral() as instance:
    result = dg.materialize(
        [docs.build_assets()], partition_key="a", instance=instance, raise_on_error=False,
        resources={
            "compute": pools_run.compute(options),
            "store": pools_run.vd.FragmentStore(root=options["root"] + "/store"),
        },
    )
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            print("STEP_FAILURE", data.user_failure_data.description, flush=True)
print("SUCCESS", result.success, flush=True)
import ray
print("CONNECTED", ray.is_initialized(), flush=True)
"""


@pytest.fixture
def head() -> Iterator[Head]:
    """A local head of the test's own."""
    local = LocalHead(**SETTINGS)
    yield local.ensure()
    local.stop()


@pytest.mark.parametrize("lost", ["gcs", "raylet"])
def test_a_run_fails_by_an_error_of_ours(lost, head, tmp_path):
    write_source(tmp_path / "src" / "a", {"id": range(400)}, row_group_size=10)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "models.py").write_text(MODELS)
    given = {"log": str(tmp_path), "sleep": 0.3}
    options = {
        "root": str(tmp_path),
        "models": str(tmp_path / "models"),
        "stages": {"slow": {"model": "Model", "fn_constructor_kwargs": given}},
        "cluster": SETTINGS,
    }
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    run = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(options), str(TESTS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, head_watch.RECONNECT: "6"},
    )
    until((tmp_path / "calls").exists, "it computes", 90)

    os.kill(head.pid if lost == "gcs" else head.raylet_pid, signal.SIGKILL)

    try:
        output = run.communicate(timeout=120)[0]
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, output[-4000:]
    (failure,) = [line for line in output.splitlines() if line.startswith("STEP_FAILURE")]
    assert "stages 'docs/slow'" in failure
    gone = ["(the raylet) is gone"]
    if lost != "raylet":  # the raylet ends some time after the GCS does
        gone.append("has not answered for")
    assert any(what in failure for what in gone)
    assert "Finished parts are kept" in failure
    assert "SUCCESS False" in output
    assert "CONNECTED False" in output  # so that the next attempt finds another head
