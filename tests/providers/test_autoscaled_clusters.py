"""A cluster that adds nodes: Ray's own autoscalers, both versions, with nodes on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import vane_dagster
from support.data import read_stage, write_source
from support.heads import free_port, head
from support.pools_process import Process

HEAD_ID = "f" * 51 + "00000"
ONE = {"resources": {"accelerator": 1}}
LISTS = (
    "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
    "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files",
    "rsync_exclude", "rsync_filter",
)  # fmt: skip


@dataclass(frozen=True)
class Growing:
    """A head of 1 CPU whose autoscaler may add one node, with an accelerator."""

    address: str
    version: int

    def gcs(self) -> Any:
        from ray._raylet import GcsClient

        return GcsClient(address=self.address)

    def ever_asked(self) -> bool:
        return self.gcs().internal_kv_get(b"asked", namespace=b"vane_dagster") is not None

    def asks(self) -> list[Any]:
        """What the autoscaler is asked for at present."""
        from ray.autoscaler.v2.sdk import get_cluster_resource_state

        if self.version == 2:
            found = get_cluster_resource_state(self.gcs()).cluster_resource_constraints
            return [r for constraint in found for r in constraint.resource_requests]
        text = self.gcs().internal_kv_get(b"__autoscaler_resource_request", namespace=None)
        return json.loads(text) if text else []


def settings(address: str) -> dict[str, Any]:
    """The autoscaler's; Ray's own nodes for tests, named so that both versions take them."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    return {
        "cluster_name": "growing",
        "max_workers": 4,
        "provider": {
            "type": "external",
            "module": provider,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
            "head_node_id": HEAD_ID,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "accelerated": {
                "resources": {"CPU": 1, "accelerator": 1, "object_store_memory": 80_000_000},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 1,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in LISTS},
    }


@pytest.fixture(scope="module", params=[1, 2])
def growing(request: pytest.FixtureRequest) -> Iterator[Growing]:
    folder = Path(tempfile.mkdtemp(prefix="va-", dir="/tmp"))
    port = free_port()
    config = folder / "autoscaler.json"
    config.write_text(json.dumps(settings(f"127.0.0.1:{port}")))
    options = ["--num-cpus=1", "--num-gpus=0", f"--port={port}", f"--autoscaling-config={config}"]
    variables = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_enable_autoscaler_v2": str(int(request.param == 2)),
        "PYTHONPATH": str(Path(vane_dagster.__file__).parent.parent),
    }
    try:
        with head(folder, *options, **variables) as started:
            yield Growing(started.address, request.param)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_source(tmp_path / "src" / "a", {"id": range(10)})
    return tmp_path


def test_a_run_that_fits_asks_for_nothing(growing, source):
    if growing.version == 2:
        pytest.skip("what is decided before the autoscaler is asked is the same for both")
    run = Process(source, {"out": {}}, "a", address=growing.address)
    run.done()
    assert "autoscaler" not in run.output
    assert not growing.ever_asked()


def test_a_run_waits_for_a_node_that_is_added(growing, source):
    run = Process(source, {"out": ONE}, "a", address=growing.address)
    run.done()
    out = read_stage(source / "store", "docs", "out", "a")
    assert sorted(out["out"].to_pylist()) == [2 * n for n in range(10)]
    waiting = "waiting for Model: the cluster's autoscaler adds nodes to hold 1 x 1 accelerator"
    assert waiting in run.output
    taken_back(growing)


def test_more_than_can_be_added_is_refused(growing, source):
    run = Process(source, {"out": {**ONE, "concurrency": 3}}, "a", address=growing.address)
    text = run.failed()
    assert "stage 'docs/out': Model: 3 workers of 1 accelerator each were asked for" in text
    assert "and its autoscaler has no nodes to add for that. Declare concurrency=(1, 3)" in text
    assert not (source / "loads").exists()
    taken_back(growing)


LEASES = """
import sys, threading
from vane_dagster.errors import ComputeError
from vane_dagster.compute.api import Cancelled
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.compute.waits import Waits
from vane_dagster.worker.protocol import PoolSpec
from vane_dagster.orchestration.resources import connect_address

connect_address(sys.argv[1], {})
pool = PoolSpec("m", "Model", (3, 3), {"accelerator": 1.0})
try:
    RayBackend().lease("run-1", [pool])
except ComputeError as error:
    print(error)
stop = threading.Event()
try:
    waits = Waits(lambda event: (print(event.text), stop.set()))
    RayBackend().lease("run-2", [pool], stop, waits=waits)
except Cancelled:
    print("cancelled")
"""


def test_a_lease_that_can_never_be_served_ends_and_one_that_is_cancelled_wants_nothing(growing):
    """As where the cluster has changed since the run was checked."""
    command = [sys.executable, "-c", LEASES, growing.address]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    clean["RAY_AUTH_MODE"] = "disabled"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean)
    refused, waited, cancelled = done.stdout.splitlines()
    assert refused.startswith("'Model': 3 x 1 accelerator were asked for; the nodes have ")
    assert "and the autoscaler has none to add for that. Lower concurrency or" in refused
    assert waited.startswith("waiting for Model: the cluster's autoscaler adds nodes to hold 3 x 1")
    assert cancelled == "cancelled"
    taken_back(growing)


def taken_back(growing: Growing) -> None:
    deadline = time.monotonic() + 30
    while growing.asks():
        assert time.monotonic() < deadline, f"still asked for: {growing.asks()}"
        time.sleep(0.1)
    assert growing.ever_asked()
