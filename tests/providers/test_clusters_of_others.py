"""Clusters of others in all ways: Ray Client, dagster-ray, GPUs, other versions of our code."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from click.testing import CliRunner

import vane_dagster as vd
from support.data import read_stage, write_source
from support.heads import Cluster, head
from support.pools_process import Process
from vane_dagster.cli.main import main

KEYS = "abcd"


def ids(key: str) -> range:
    """Different rows in each partition, so that none is a copy."""
    start = 40 * KEYS.index(key)
    return range(start, start + 40)


@pytest.fixture(scope="module")
def own_head() -> Iterator[Cluster]:
    """A head that was started with ``ray start``."""
    ray.shutdown()  # from the head of tests before
    with head() as cluster:
        yield cluster


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for key in KEYS:
        write_source(tmp_path / "src" / key, {"id": ids(key)})
    return tmp_path


def outs(folder: Path, key: str) -> pa.Table:
    return read_stage(folder / "store", "docs", "out", key).sort_by("id")


def test_every_way_to_a_cluster_shares_its_pools(source, own_head, monkeypatch):
    """By address, by Ray Client, by a resource that connects itself, and by one that does not."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ways = {
        "a": {"address": own_head.address},
        "b": {"address": own_head.client},
        "c": {"resource": own_head.address},
        "d": {"resource": own_head.client, "connect": False},
    }
    for key, where in ways.items():
        run = Process(source, {"out": {}}, key, **where)
        (found,) = run.done()
        assert found["warm_hits"] == (key != "a"), f"{where}: {found}"
        assert outs(source, key)["out"].to_pylist() == [2 * n for n in ids(key)]
    assert len((source / "loads").read_text().split()) == 1
    listed = CliRunner().invoke(main, ["pools", "--address", own_head.address])
    assert listed.exit_code == 0, (listed.output, listed.exception)
    header, *lines = listed.stdout.splitlines()
    assert header.startswith("POOL ")
    assert any(line.startswith("Model ") and " ready " in line for line in lines)
    ray.shutdown()


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("shared", {"rayclusters": 1, "rayjobs": 0, "leases": 0}),
        ("deleted", {"rayclusters": 0, "rayjobs": 0, "leases": 0}),
        ("job", {"rayclusters": 1, "rayjobs": 1, "leases": 0}),
    ],
)
def test_clusters_of_kuberay(kind, left, source, own_head, monkeypatch):
    """Two steps on each resource of dagster-ray; the API server is ours, the head is Ray's."""
    pytest.importorskip("kubernetes", reason="dagster-ray[kuberay] is not installed")
    from support.kuberay import api

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with api(source) as (server, kube_config):
        port = int(own_head.client.rpartition(":")[2])
        where = {"kind": kind, "kube_config": kube_config, "port": port}
        _, second = Process(source, {"out": {}}, "ab", kuberay=where).done()
    assert second["warm_hits"] == 1
    for key in "ab":
        assert outs(source, key)["out"].to_pylist() == [2 * n for n in ids(key)]
    assert {kind: len(objects) for kind, objects in server.objects.items()} == left
    created = [kind for method, kind in server.requests if method == "POST"]
    assert created.count("rayclusters") + created.count("rayjobs") == 1 + (kind == "deleted")


def test_two_actors_share_a_gpu(source, own_head):
    stage = {"concurrency": 2, "gpus": 0.5, "fn_constructor_kwargs": {"sleep": 0.3}}
    Process(source, {"out": stage}, "a", address=own_head.address).done()
    pids = (source / "loads").read_text().split()
    assert len(set(pids)) == 2
    assert outs(source, "a")["out"].to_pylist() == [2 * n for n in ids("a")]


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
    assert outs(source, "a")["out"].to_pylist() == [2 * n for n in ids("a")], (
        "once it is right, nothing is left"
    )


FRESH_WORKERS = {"runtime_env": {"env_vars": {"FRESH": "1"}}}
