"""Clusters that are not `LocalCluster`: an address, Ray Client, a dagster-ray resource."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.heads import Cluster, free_port, head
from support.pools_process import Process
from vane_dagster.errors import ComputeError


@pytest.fixture(scope="module")
def own_head() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="vr-", dir="/tmp"))
    try:
        with head(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for key in "abcd":
        write_source(tmp_path / "src" / key, {"id": range(40)})
    return tmp_path


def outs(folder: Path, key: str) -> pa.Table:
    return read_stage(folder / "store", "docs", "out", key).sort_by("id")


DOUBLED = [2 * n for n in range(40)]


def test_every_way_to_a_cluster_shares_its_pools(source, own_head):
    """By address, by Ray Client, by a resource that connects itself, and by one that does not."""
    ways = {
        "a": {"address": own_head.address},
        "b": {"address": own_head.client},
        "c": {"resource": own_head.address},
        "d": {"resource": own_head.client, "connect": False},
    }
    for key, where in ways.items():
        run = Process(source, {"out": {}}, key, **where)
        (found,) = run.done()
        assert "deletes its cluster" not in run.output
        assert found["warm_hits"] == (key != "a"), f"{where}: {found}"
        assert outs(source, key)["out"].to_pylist() == DOUBLED
    assert len((source / "loads").read_text().split()) == 1


def test_a_cluster_that_is_deleted_after_each_step_is_warned_of(source, own_head):
    run = Process(source, {"out": {}}, "a", resource=own_head.address, deleted=True)
    run.done()
    assert "DeletedRay deletes its cluster after each step (cleanup='always')" in run.output
    assert "lifecycle=Lifecycle(cleanup='never')" in run.output


def test_two_actors_share_a_gpu(source, own_head):
    stage = {"concurrency": 2, "gpus": 0.5, "fn_constructor_kwargs": {"sleep": 0.3}}
    Process(source, {"out": stage}, "a", address=own_head.address).done()
    pids = (source / "loads").read_text().split()
    assert len(set(pids)) == 2
    assert outs(source, "a")["out"].to_pylist() == DOUBLED
    message = Process(
        source, {"out": {"concurrency": 3, "gpus": 0.5}}, "b", address=own_head.address
    ).failed()
    assert (
        "Model: 3 workers of 0.5 GPU each were asked for; the cluster has 1 GPU on 1 node"
        in message
    )
    assert "concurrency=(1, 3)" in message


BROKEN = """
class Model:
    def __init__(self, log):
        import a_module_that_is_missing

    def __call__(self, batch):
        return batch
"""


@pytest.mark.parametrize("local", [True, False])
def test_a_module_that_is_missing_in_the_worker_is_named(source, own_head, local):
    (source / "models").mkdir()
    (source / "models" / "models.py").write_text(BROKEN)
    where = {"local": True} if local else {"address": own_head.address}
    message = Process(source, {"out": {}}, "a", **where).failed()
    assert "No module named 'a_module_that_is_missing'" in message
    assert "Install 'a_module_that_is_missing' where the workers run" in message


def pools_of(address: str) -> subprocess.CompletedProcess[str]:
    """``vane-dagster pools --address``, in a process that is connected to nothing."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    code = "from vane_dagster.cli.main import main; main()"
    command = [sys.executable, "-c", code, "pools", "--address", address]
    return subprocess.run(command, capture_output=True, text=True, env=clean, timeout=60)


def test_pools_of_another_cluster_are_listed(source, own_head):
    Process(source, {"out": {}}, "a", address=own_head.address).done()
    listed = pools_of(own_head.address)
    assert listed.returncode == 0, listed.stderr
    header, *lines = listed.stdout.splitlines()
    assert header.startswith("MODEL ")
    assert any(line.startswith("Model ") and " ready " in line for line in lines)


def test_an_address_where_nothing_is_fails_with_the_address(source):
    where = f"127.0.0.1:{free_port()}"
    message = Process(source, {"out": {}}, "a", address=where).failed()
    assert f"the Ray cluster at '{where}' cannot be reached" in message


def test_a_cluster_with_other_code_of_ours_is_refused(source, own_head):
    package = own_head.python_path / "vane_dagster"
    shutil.copytree(Path(vd.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        with open(package / "worker" / "host.py", "a") as opened:
            opened.write("\n# another version\n")
        where = {"address": own_head.address, "ray_init_options": FRESH_WORKERS}
        message = Process(source, {"out": {}}, "a", **where).failed()
        assert "the cluster has another version of vane-dagster than the driver" in message

        (package / "compute" / "pool_manager.py").write_text("raise ImportError('no such thing')\n")
        message = Process(source, {"out": {}}, "a", **where).failed()
        assert "the pool manager cannot run on the cluster" in message
        assert "no such thing" in message
        assert "Install vane-dagster there" in message
    finally:
        shutil.rmtree(package)
    Process(source, {"out": {}}, "a", **where).done()
    assert outs(source, "a")["out"].to_pylist() == DOUBLED, "once it is right, nothing is left"


FRESH_WORKERS = {"runtime_env": {"env_vars": {"FRESH": "1"}}}


def test_cluster_and_address_together_are_refused():
    compute = vd.RayCompute(cluster=vd.LocalCluster(), address="auto")
    with pytest.raises(ComputeError, match="either cluster or address, not both"):
        compute.setup_for_execution(None)


def test_what_is_no_cluster_is_refused():
    compute = vd.RayCompute(cluster=vd.FragmentStore(root="x"))
    with pytest.raises(ComputeError, match="cluster is a FragmentStore; expected a LocalCluster"):
        compute.backend(print)


def test_the_command_says_why_it_cannot_connect():
    where = f"127.0.0.1:{free_port()}"
    done = pools_of(where)
    assert done.returncode == 1
    assert f"the Ray cluster at '{where}' cannot be reached" in done.stderr
