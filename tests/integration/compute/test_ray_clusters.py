"""Clusters that are not `LocalCluster`: an address, Ray Client, a dagster-ray resource."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import ray

import vane_dagster as vd
from support import forked
from support.heads import free_port
from support.own_heads import DOUBLED, outs, own_head, source  # noqa: F401  # fixtures
from support.pools_process import Process
from vane_dagster.compute import connection
from vane_dagster.errors import ComputeError


def test_an_address_and_a_resource_share_pools(source, own_head):
    """Ray Client and resources that do not connect are tried with the providers."""
    for key, where in (("a", "address"), ("b", "resource")):
        run = Process(source, {"out": {}}, key, **{where: own_head.address})
        (found,) = run.done()
        assert found["warm_hits"] == (key != "a"), f"{where}: {found}"
        assert outs(source, key)["out"].to_pylist() == DOUBLED
    assert len((source / "loads").read_text().split()) == 1

    listed = pools_of(own_head.address)
    assert listed.returncode == 0, listed.stderr
    header, *lines = listed.stdout.splitlines()
    assert header.startswith("POOL ")
    assert any(line.startswith("Model ") and " ready " in line for line in lines)


def pools_of(address: str) -> subprocess.CompletedProcess[str]:
    """``vane-dagster pools --address``, in a process that is connected to nothing."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    code = "from vane_dagster.cli.main import main; main()"
    return forked.run(["-c", code, "pools", "--address", address], clean, Path.cwd(), timeout=60)


def test_an_address_where_nothing_is_fails_with_the_address(source):
    where = f"127.0.0.1:{free_port()}"
    message = Process(source, {"out": {}}, "a", address=where).failed()
    assert f"the Ray cluster at '{where}' cannot be reached" in message


def test_what_is_no_cluster_is_refused(cluster):
    with pytest.raises(ComputeError, match="either cluster or address, not both"):
        vd.RayCompute(cluster=cluster, address="auto").backend()
    with pytest.raises(ComputeError, match="cluster is a FragmentStore; expected a LocalCluster"):
        vd.RayCompute(cluster=vd.FragmentStore(root="x")).backend()
    compute = vd.RayCompute(cluster=cluster, subprocesses=vd.FragmentStore(root="x"))
    backend = compute.backend()
    with pytest.raises(ComputeError, match="subprocesses is a FragmentStore; expected a LocalComp"):
        compute.with_subprocesses(backend)
    compute.close(backend)


def test_gpus_that_this_machine_gives_to_the_cluster_are_not_for_subprocesses(
    own_head, monkeypatch
):
    ray.shutdown()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    compute = vd.RayCompute(address=own_head.address)
    backend = compute.with_subprocesses(compute.backend())
    try:
        capacity = backend.capacity()
        assert capacity.of(False).total("GPU") == 1
        assert capacity.of(True).total("GPU") == 1
    finally:
        compute.close(backend)
        ray.shutdown()


def test_a_process_that_is_connected_elsewhere_is_told_so(cluster):
    cluster.connect()

    with pytest.raises(ComputeError, match=r"is connected to the Ray cluster at 127\.0\.0\.1:"):
        vd.RayCompute(address="127.0.0.1:1").backend()


def test_threads_connect_to_a_cluster_at_the_same_time(cluster):
    cluster.connect()
    code = """
from concurrent.futures import ThreadPoolExecutor
import vane_dagster as vd
compute = vd.RayCompute(cluster=vd.LocalCluster(name="tests"))
with ThreadPoolExecutor(6) as threads:
    answers = [threads.submit(compute.backend) for _ in range(6)]
    assert {len(answer.result().capacity().nodes) for answer in answers} == {1}
import ray
assert ray.is_initialized()
"""
    found = forked.run(["-c", code], {**os.environ}, Path.cwd(), timeout=60)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_that_accepts_connections_but_never_responds_is_an_error(scheme, monkeypatch):
    ray.shutdown()
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"{scheme}127.0.0.1:{hung.getsockname()[1]}"
        expected = f"at '{address}' cannot be reached: no response within 0.2 s"
        with pytest.raises(ComputeError, match=expected):
            vd.RayCompute(address=address).backend()


def test_an_explicit_address_of_the_connected_cluster_is_that_cluster(cluster):
    cluster.connect()
    address = ray.get_runtime_context().gcs_address

    assert vd.RayCompute(address=address).backend().capacity().total("accelerator") == 1
