"""Clusters that are not `LocalCluster`: an address, Ray Client, a dagster-ray resource."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import ray

import vane_dagster as vd
from support import forked
from support.heads import free_port
from support.own_heads import DOUBLED, outs, own_head, source  # noqa: F401  # fixtures
from support.pools_process import Process
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
    assert header.startswith("MODEL ")
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


def test_cluster_and_address_together_are_refused():
    compute = vd.RayCompute(cluster=vd.LocalCluster(), address="auto")
    with pytest.raises(ComputeError, match="either cluster or address, not both"):
        compute.setup_for_execution(None)


def test_what_is_no_cluster_is_refused():
    compute = vd.RayCompute(cluster=vd.FragmentStore(root="x"))
    with pytest.raises(ComputeError, match="cluster is a FragmentStore; expected a LocalCluster"):
        compute.backend(print)


def test_gpus_that_this_machine_gives_to_the_cluster_are_not_for_subprocesses(
    own_head, monkeypatch
):
    ray.shutdown()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    compute = vd.RayCompute(address=own_head.address)
    backend = compute.with_subprocesses(compute.backend(print))
    try:
        capacity = backend.capacity()
        assert capacity.of(False).total("GPU") == 1
        assert capacity.of(True).total("GPU") == 1
    finally:
        compute.close(backend)
        ray.shutdown()


def test_other_resources_for_subprocesses_are_refused(cluster):
    compute = vd.RayCompute(cluster=cluster, subprocesses=vd.FragmentStore(root="x"))
    backend = compute.backend(print)
    with pytest.raises(ComputeError, match="subprocesses is a FragmentStore; expected a LocalComp"):
        compute.with_subprocesses(backend)
    compute.close(backend)
