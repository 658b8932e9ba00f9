"""Clusters that are not `LocalCluster`: an address, Ray Client, a dagster-ray resource."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import ray

import vane_dagster as vd
from support import forked
from support.heads import free_port
from support.own_heads import DOUBLED, outs, own_head, source  # noqa: F401  # fixtures
from vane_dagster.compute import connection
from vane_dagster.errors import ComputeError


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


def test_an_address_where_nothing_answers_is_an_error(monkeypatch):
    """There is nothing; or something that accepts connections, and never responds."""
    ray.shutdown()
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"ray://127.0.0.1:{hung.getsockname()[1]}"
        expected = f"at '{address}' cannot be reached: no response within 0.2 s"
        with pytest.raises(ComputeError, match=expected):
            vd.RayCompute(address=address).backend()
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ComputeError, match=f"the Ray cluster at '{address}' cannot be reached"):
        vd.RayCompute(address=address).backend()


def test_an_explicit_address_of_the_connected_cluster_is_that_cluster(cluster):
    cluster.connect()
    address = ray.get_runtime_context().gcs_address

    assert vd.RayCompute(address=address).backend().capacity().total("accelerator") == 1
