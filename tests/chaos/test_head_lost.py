"""The cluster's head is gone in the middle of a run: the step fails by an error of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support import heads
from support.data import write_source
from support.pool_models import until
from support.pools_process import Process
from vane_dagster.compute import head_watch
from vane_dagster.compute.local_head import Head, LocalHead
from vane_dagster.compute.processes import marked

SETTINGS = {"name": "lost", "num_cpus": 2}


@pytest.fixture
def head() -> Iterator[Head]:
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

    processes = {name: pid for pid, name in marked(LocalHead(**SETTINGS).mark).items()}
    os.kill(processes["gcs_server" if lost == "gcs" else "raylet"], signal.SIGKILL)

    output = run.failed()
    assert "stages 'docs/slow'" in output
    gone = ["(the raylet) has ended"]
    if lost != "raylet":  # the raylet ends some time after the GCS does
        gone.append("has not responded for")
    assert any(what in output for what in gone)
    assert "Finished parts are kept" in output
    assert "connected: False" in output  # so that the next attempt finds another head


WATCHES = """
import sys, time
from ray._raylet import GcsClient
from vane_dagster.compute.head_watch import HeadWatch
from vane_dagster.errors import ClusterLostError

gcs = GcsClient(address=sys.argv[1])
(node,) = [id.hex() for id in gcs.get_all_node_info(timeout=10)]
watch = HeadWatch(gcs, node, 60.0)
watch.check()
print("watching", flush=True)
input()
try:
    while watch.look() or True:
        watch.check()
        time.sleep(0.1)
except ClusterLostError as error:
    print(error)
"""


@pytest.mark.parametrize("storage", ["memory", "rocksdb"])
def test_a_cluster_that_comes_back_at_the_same_address_is_another(storage, tmp_path):
    """Also if it reuses a volume, and with it the ids of the cluster and of the session."""
    port = heads.free_port()
    volume = {"RAY_gcs_storage": storage, "RAY_gcs_storage_path": str(tmp_path / "volume")}
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with heads.head(f"--port={port}", **volume) as first:
        watch = subprocess.Popen(
            [sys.executable, "-c", WATCHES, first.address],
            env={**clean, "RAY_AUTH_MODE": "disabled"},
            **pipes,
        )
        assert watch.stdout is not None
        assert watch.stdout.readline() == "watching\n"
    with heads.head(f"--port={port}", **volume) as second:
        assert second.address == first.address
        error, _ = watch.communicate("\n", timeout=60)
    what = {
        "memory": "another cluster responds at its address",
        "rocksdb": "(the raylet) has ended",
    }
    assert what[storage] in error
