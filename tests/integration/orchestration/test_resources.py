"""The compute resources' own manners."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import ray

import vane_dagster as vd
from vane_dagster.compute import connection


def test_a_process_that_is_connected_elsewhere_is_told_so(cluster):
    cluster.connect()

    with pytest.raises(
        vd.errors.ComputeError, match=r"is connected to the Ray cluster at 127\.0\.0\.1:"
    ):
        vd.RayCompute(address="127.0.0.1:1").backend(print)


def test_threads_connect_to_a_cluster_at_the_same_time(cluster):
    cluster.connect()
    code = """
from concurrent.futures import ThreadPoolExecutor
import vane_dagster as vd
compute = vd.RayCompute(cluster=vd.LocalCluster(name="tests"))
with ThreadPoolExecutor(6) as threads:
    answers = [threads.submit(compute.backend, print) for _ in range(6)]
    assert {len(answer.result().capacity().nodes) for answer in answers} == {1}
import ray
assert ray.is_initialized()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_that_accepts_connections_but_never_responds_is_an_error(scheme, monkeypatch):
    ray.shutdown()
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"{scheme}127.0.0.1:{hung.getsockname()[1]}"
        expected = f"at '{address}' cannot be reached: no response within 0.2 s"
        with pytest.raises(vd.errors.ComputeError, match=expected):
            vd.RayCompute(address=address).backend(print)


def test_an_explicit_address_of_the_connected_cluster_is_that_cluster(cluster):
    cluster.connect()
    address = ray.get_runtime_context().gcs_address

    assert vd.RayCompute(address=address).backend(print).capacity().total("accelerator") == 1
