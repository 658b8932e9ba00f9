"""The cluster's head is gone in the middle of a run: the step fails by an error of ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from support.data import write_source
from support.pool_models import until
from support.pools_process import Process
from vane_dagster.compute import head_watch
from vane_dagster.compute.local_head import Head, LocalHead

SETTINGS = {"name": "lost", "num_cpus": 2}


@pytest.fixture
def head() -> Iterator[Head]:
    """A local head of the test's own."""
    local = LocalHead(**SETTINGS)
    yield local.ensure()
    local.stop()


@pytest.mark.parametrize("lost", ["gcs", "raylet"])
def test_a_run_fails_by_an_error_of_ours(lost, head, tmp_path):
    write_source(tmp_path / "src" / "a", {"id": range(400)}, row_group_size=10)
    stage = {"fn_constructor_kwargs": {"sleep": 0.3}}
    variables = {head_watch.RECONNECT: "6"}
    run = Process(tmp_path, {"slow": stage}, "a", variables, cluster=SETTINGS)
    until((tmp_path / "calls").exists, "it computes", 90)

    os.kill(head.pid if lost == "gcs" else head.raylet_pid, signal.SIGKILL)

    output = run.failed()
    assert "stages 'docs/slow'" in output
    gone = ["(the raylet) is gone"]
    if lost != "raylet":  # the raylet ends some time after the GCS does
        gone.append("has not answered for")
    assert any(what in output for what in gone)
    assert "Finished parts are kept" in output
    assert "connected: False" in output  # so that the next attempt finds another head
