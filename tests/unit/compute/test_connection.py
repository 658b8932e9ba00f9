"""Connections of a process to a Ray cluster, with a Ray that is not started."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray

import vane_dagster as vd
from support.heads import free_port
from vane_dagster.compute import connection
from vane_dagster.compute.connection import connect, connect_address
from vane_dagster.compute.local_head import Head, LocalHead
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.errors import ClusterLostError, ComputeError


def test_an_address_where_nothing_answers_is_an_error(monkeypatch):
    """There is nothing; or something that accepts connections, and never responds."""
    monkeypatch.setattr(connection, "ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        place = f"127.0.0.1:{hung.getsockname()[1]}"
        for address in (place, f"ray://{place}"):
            with pytest.raises(ComputeError) as caught:
                connect_address(address, {})
            expected = f"at '{address}' cannot be reached: no response within 0.02 s. Check the ad"
            assert expected in str(caught.value)
            assert "cluster stop" not in str(caught.value), "it may be no head of ours"
            assert caught.value.__suppress_context__
        monkeypatch.setattr(connection, "connect_environment", lambda head: {})
        with pytest.raises(ComputeError) as caught:
            connect(Head(place, 1, "", "", 0.0, "", (), "default"))
        assert f"`vane-dagster cluster stop --address {place}`" in str(caught.value)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ComputeError, match=f"the Ray cluster at '{address}' cannot be reached"):
        connect_address(address, {})


@pytest.mark.parametrize("ip", ["127.0.0.1", "192.0.2.2"])
def test_the_cluster_that_is_connected_is_known_by_each_of_its_addresses(ip, monkeypatch):
    """Also by a loopback address, which `ray.init` replaces by the node's."""
    context = SimpleNamespace(gcs_address=f"{ip}:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: ip)
    for same in (f"{ip}:6379", "127.0.0.1:6379", "localhost:6379", "ray://any:1", "auto", None):
        connect_address(same, {})
    for other in ("127.0.0.1:1", "192.0.2.3:6379"):
        with pytest.raises(ComputeError, match=rf"connected to .* {ip}:6379, not to '{other}'"):
            connect_address(other, {})


def test_threads_connect_one_after_the_other(monkeypatch):
    connecting: list[int] = []

    def connect(self: LocalHead, start: bool) -> None:
        connecting.append(1)
        time.sleep(0.001)
        assert len(connecting) == 1
        connecting.pop()

    monkeypatch.setattr(LocalHead, "connect", connect)
    compute = vd.RayCompute(cluster=vd.LocalCluster(name="tests"))
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: compute._connect(True), range(12)))


def test_a_run_whose_cluster_was_replaced_since_the_last_one_reconnects(monkeypatch):
    made: list[object] = [RayBackend.__new__(RayBackend), ClusterLostError("gone")]
    connected: list[bool] = []

    def backend(idle_seconds: float) -> object:
        assert len(connected) == 3 - len(made)
        if isinstance(each := made.pop(), ClusterLostError):
            raise each
        return each

    monkeypatch.setattr("vane_dagster.compute.ray_backend.RayBackend", backend)
    monkeypatch.setattr(vd.RayCompute, "_connect", lambda self, start: connected.append(start))
    assert isinstance(vd.RayCompute(address="127.0.0.1:1").backend(), RayBackend)
    assert connected == [True, True]


def test_what_is_no_cluster_is_refused():
    with pytest.raises(ComputeError, match="either cluster or address, not both"):
        vd.RayCompute(cluster=vd.LocalCluster(), address="auto").backend()
    with pytest.raises(ComputeError, match="cluster is a FragmentStore; expected a LocalCluster"):
        vd.RayCompute(cluster=vd.FragmentStore(root="x")).backend()
    compute = vd.RayCompute(subprocesses=vd.FragmentStore(root="x"))
    with pytest.raises(ComputeError, match="subprocesses is a FragmentStore; expected a LocalComp"):
        compute.with_subprocesses(RayBackend.__new__(RayBackend))


@pytest.mark.parametrize(("is_client", "gpus"), [(False, 2), (True, 0)])
def test_gpus_that_this_machine_gives_to_the_cluster_are_not_for_subprocesses(
    is_client, gpus, monkeypatch
):
    nodes = [{"NodeID": "own", "Resources": {"GPU": 2.0}}, {"NodeID": "b", "Resources": {"GPU": 4}}]
    context = SimpleNamespace(get_node_id=lambda: "own")
    backend = RayBackend.__new__(RayBackend)
    backend._watch = SimpleNamespace(call=lambda call: call())
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: is_client)
    made = []
    monkeypatch.setattr(
        "vane_dagster.compute.local_backend.LocalBackend.warm", lambda *given: made.append(given)
    )
    own = vd.LocalCompute(num_cpus=3)
    vd.RayCompute(subprocesses=own).with_subprocesses(backend)
    assert made == [(3, None, {}, gpus)]
