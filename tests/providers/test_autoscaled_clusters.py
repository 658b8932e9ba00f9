"""A cluster that adds nodes: Ray's own autoscalers, both versions, with nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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


GROUPS = """
import sys, time, ray
from ray.util import placement_group_table

ray.init(address=sys.argv[1], log_to_driver=False)
deadline = time.monotonic() + 30
while any(group["state"] != "REMOVED" for group in placement_group_table().values()):
    assert time.monotonic() < deadline, placement_group_table()
    time.sleep(0.1)
print(len(placement_group_table()))
"""


@dataclass(frozen=True)
class Growing:
    """A head of 1 CPU whose autoscaler may add four nodes, each with an accelerator."""

    address: str
    version: int

    def ran(self, program: str) -> list[str]:
        """Run a program on the cluster; return the lines that it printed."""
        command = [sys.executable, "-c", program, self.address]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        clean["RAY_AUTH_MODE"] = "disabled"
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def groups(self) -> int:
        """Wait until no placement group is left; return how many there have been."""
        return int(self.ran(GROUPS)[-1])


def settings(address: str) -> dict[str, Any]:
    """The autoscaler's; Ray's own nodes for tests, named so that both versions take them."""
    provider = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
    return {
        "cluster_name": "growing",
        "max_workers": 8,
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
                "max_workers": 4,
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
def growing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Growing]:
    port = free_port()
    config = tmp_path_factory.mktemp("growing") / "autoscaler.json"
    config.write_text(json.dumps(settings(f"127.0.0.1:{port}")))
    options = ["--num-cpus=1", "--num-gpus=0", f"--port={port}", f"--autoscaling-config={config}"]
    variables = {
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_enable_autoscaler_v2": str(int(request.param == 2)),
        "PYTHONPATH": str(Path(vane_dagster.__file__).parent.parent),
    }
    with head(*options, grows=True, **variables) as started:
        yield Growing(started.address, request.param)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_source(tmp_path / "src" / "a", {"id": range(10)})
    return tmp_path


def test_a_run_waits_for_a_node_that_is_added(growing, source):
    run = Process(source, {"out": ONE}, "a", address=growing.address)
    run.done()
    out = read_stage(source / "store", "docs", "out", "a")
    assert sorted(out["out"].to_pylist()) == [2 * n for n in range(10)]
    waiting = (
        "waiting for Model: the cluster's autoscaler was asked to make room for 1 x 1 accelerator"
    )
    assert waiting in run.output
    assert growing.groups() == 1


LEASES = """
import sys, threading, time
from ray.util import placement_group_table
from vane_dagster.compute.actor_names import NAMESPACE, actor_names, is_pool_manager
from vane_dagster.compute.api import Cancelled, LeaseTerms
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.compute.waits import Waits
from vane_dagster.worker.pools import PoolSpec
from vane_dagster.compute.connection import connect_address
import ray

connect_address(sys.argv[1], {})

def pool(name, workers):
    return PoolSpec(name, name, (workers, workers), {"accelerator": 1.0})
"""

TWO = """
def computed(name):
    lease = RayBackend().lease(name, [pool(name, 3)])
    print(name, len(lease.workers()), flush=True)
    time.sleep(5)
    lease.release()

runs = [threading.Thread(target=computed, args=(name,)) for name in ("one", "two")]
[run.start() for run in runs]
[run.join() for run in runs]
"""


def test_two_leases_that_fit_alone_do_not_block_each_other(growing):
    assert sorted(growing.ran(LEASES + TWO)) == ["one 3", "two 3"]
    assert growing.groups() >= 2


WAITING = """
stop = threading.Event()

def stopped(event):
    print(event.text, flush=True)
    if MANAGER_DIES:
        ray.kill(ray.get_actor(next(filter(is_pool_manager, actor_names())), namespace=NAMESPACE))
        while any(g["state"] != "REMOVED" for g in placement_group_table().values()):
            time.sleep(0.1)
        print("no group is left", flush=True)
    stop.set()

try:
    RayBackend().lease("run", [pool("m", 9)], LeaseTerms(stop, waits=Waits(stopped)))
except Cancelled:
    print("cancelled")
"""


@pytest.mark.parametrize("manager_dies", [False, True])
def test_more_than_can_be_added_is_waited_for_until_the_run_is_cancelled(growing, manager_dies):
    printed = growing.ran(f"{LEASES}\nMANAGER_DIES = {manager_dies}\n{WAITING}")
    # Fewer than nine, if the idle workers of another test may make room for the rest.
    asked = (
        r"waiting for m: the cluster's autoscaler was asked to make room for \d x 1 accelerator; "
    )
    assert re.match(asked, printed[0])
    assert printed[1:] == ["no group is left"] * manager_dies + ["cancelled"]
    growing.groups()
