"""Warm pools on a real Ray cluster: who shares them, what ends them, what they survive."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import threadpoolctl
from click.testing import CliRunner

import vane_dagster as vd
from support.pool_models import (  # noqa: F401  # fixtures
    ONE,
    SCHEMA,
    add,
    alive,
    docs,
    listed,
    meanwhile,
    note,
    noted,
    ray_compute,
    rows,
    until,
)
from support.results import failure, metadata
from vane_dagster.cli.main import main
from vane_dagster.compute.actor_names import NAMESPACE
from vane_dagster.compute.api import Cancelled
from vane_dagster.compute.pool_manager import PoolManager
from vane_dagster.compute.pool_state import LeaseRecord
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.compute.waits import Waits
from vane_dagster.events import Waiting
from vane_dagster.worker.pools import PoolRequest, PoolSpec


def test_a_pool_goes_when_another_version_needs_what_it_holds(tmp_path, ray_compute, materialize):
    """Within a version, the pool state decides alone: tests/unit/compute/test_pool_state.py."""

    class Hasty(PoolManager):
        def __init__(self, name: str) -> None:
            from vane_dagster.compute import pool_manager

            pool_manager._PLACED_SECONDS = 0.5  # in its own process
            PoolManager.__init__(self, name)

    pipeline = docs(tmp_path)
    add(pipeline, "out", tmp_path, **ONE)
    materialize(pipeline, ray_compute)
    (pid,) = noted(tmp_path / "loads")

    other = ray.remote(Hasty).options(
        name="keeper-other", namespace=NAMESPACE, num_cpus=0, lifetime="detached"
    )
    pool_manager = other.remote("keeper-other")
    try:
        claim = PoolRequest("other", "Other", (1, 1), {"accelerator": 1}, 1)
        lease = pool_manager.acquire.remote(LeaseRecord("1", "run-1", (claim,), 0.0))
        (worker,) = ray.get(lease).workers["other"]
        placed = ray.get_actor(worker, namespace=NAMESPACE).whereabouts.remote()
        assert ray.get(placed, timeout=40)
        assert [pool["label"] for pool in listed()] == ["Other"]
        until(lambda: not alive(pid), "the model's process ends", 10)
        ray.get(pool_manager.evict.remote(None, True))
    finally:
        ray.kill(pool_manager)


def test_a_failing_constructor_leaves_no_pool_and_the_other_branch_is_committed(
    tmp_path, ray_compute, materialize
):
    weights = tmp_path / "weights"

    def pipeline() -> vd.Pipeline:
        made = docs(tmp_path)
        add(made, "bad", tmp_path, needs=str(weights))
        add(made, "good", tmp_path)
        return made

    message = failure(materialize(pipeline(), ray_compute, raises=False))
    assert f"RuntimeError: no weights at {weights}" in message
    assert 'raise RuntimeError(f"no weights at {needs}")' in message, "the user's own traceback"
    assert rows(tmp_path, "good").num_rows == 60
    assert [len(pool["workers"]) for pool in listed()] == [1], "only the good one's is left"
    weights.touch()
    materialize(pipeline(), ray_compute)
    assert rows(tmp_path, "bad")["out"].to_pylist() == [2 * n for n in range(60)]


def test_a_run_that_waits_for_a_lease_can_be_cancelled(ray_compute):
    events: list[Any] = []
    backend = RayBackend()
    pool = PoolSpec("mine", "Mine", (1, 1), {"accelerator": 1})
    other = PoolSpec("theirs", "Theirs", (1, 1), {"accelerator": 1})
    lease = backend.lease("run-1", [pool])
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(Cancelled):
        backend.lease("run-2", [other], stop, waits=Waits(events.append))
    text = "waiting for Theirs: its resources are leased or awaited by run run-1"
    assert events == [Waiting(text, ("run-1",))]
    lease.release()
    backend.lease("run-3", [other]).release()
    assert [pool["label"] for pool in listed()] == ["Theirs"]


# The worker's environment


class Environment:
    """Tells what its process was given."""

    def __init__(self) -> None:
        import torch

        self.token = os.environ.get("VANE_TEST_TOKEN", "unset")
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        self.torch = torch.get_num_threads()

    def __call__(self, batch):
        count = len(batch["id"])
        omp = int(os.environ["OMP_NUM_THREADS"])
        libraries = threadpoolctl.threadpool_info()
        blas = max(one["num_threads"] for one in libraries if one["user_api"] == "blas")
        facts = {"omp": omp, "blas": blas, "arrow": pa.cpu_count(), "torch": self.torch}
        columns = {name: np.full(count, value) for name, value in facts.items()}
        return {
            "id": batch["id"],
            "token": [self.token[::-1]] * count,
            "gpus": [self.gpus] * count,
            **columns,
        }


COUNTS = ("omp", "blas", "arrow", "torch")
FACTS = {"id": "BIGINT", "token": "VARCHAR", "gpus": "VARCHAR", **dict.fromkeys(COUNTS, "BIGINT")}


def test_variables_and_threads_reach_the_workers(ray_compute, tmp_path, materialize, monkeypatch):
    monkeypatch.setenv("VANE_TEST_TOKEN", "s3cret-of-mine")
    pipeline = docs(tmp_path)
    pipeline.map_batches(
        "out",
        Environment,
        schema=FACTS,
        concurrency=vd.Workers(1, env_vars=["VANE_TEST_TOKEN"]),
        batch_format="numpy",
    )

    materialize(pipeline, ray_compute)

    (found,) = rows(tmp_path, "out").slice(0, 1).drop_columns("id").to_pylist()
    token = "s3cret-of-mine"[::-1]
    assert found == {"token": token, "gpus": "", **dict.fromkeys(COUNTS, 2)}


# vane-dagster pools


def test_a_pool_that_grows_keeps_its_first_actor_is_listed_and_evicted(
    tmp_path, ray_compute, materialize
):
    for concurrency in (1, 2):
        pipeline = docs(tmp_path)
        add(pipeline, "out", tmp_path, concurrency=concurrency)
        result = materialize(pipeline, ray_compute, config={"force": True})
    assert metadata(result, "out")["warm_hits"] == 1
    pids = until(lambda: len(found := noted(tmp_path / "loads")) == 2 and found, "both are ready")
    backend = RayBackend()
    lease = backend.lease("a-run-of-mine", [PoolSpec("leased", "Leased", (1, 1))])

    def call(*args: str) -> Any:
        return CliRunner().invoke(main, ["pools", *args, "--name", "tests"])

    pools = {pool["label"]: pool for pool in json.loads(call("--json").output)}
    assert {w["pid"] for w in pools["Model"]["workers"]} == set(pids)
    assert {w["state"] for w in pools["Model"]["workers"]} == {"ready"}
    assert sum(w["batches"] for w in pools["Model"]["workers"]) == 24
    assert pools["Leased"]["leases"] == ["a-run-of-mine"]
    assert pools["Leased"]["workers"][0]["state"] == "starting"
    assert pools["read and write"]["identity"] == "io"

    shown = call().output
    header, *lines = shown.splitlines()
    assert header.split() == [
        "POOL", "IDENTITY", "STATE", "ACTORS", "PIDS", "DEVICE", "NODE", "URL", "LEASES", "IDLE",
        "BATCHES", "LOAD",
    ]  # fmt: skip
    (line,) = [line for line in lines if line.startswith("Model")]
    assert all(str(pid) in line for pid in pids)

    refused = call("evict", "leased")
    assert refused.exit_code == 1
    assert "Leased (leased) is leased by a-run-of-mine; --force ends it" in refused.output
    identity = pools["Model"]["identity"]
    ended = call("evict", identity[:6])
    assert (ended.exit_code, ended.output) == (0, f"Ended Model ({identity}).\n")
    until(lambda: not any(alive(pid) for pid in pids), "the processes end", 10)
    assert call("evict", "nothing").exit_code == 1
    assert call("evict").exit_code == 2
    assert call("evict", "--all", "--force").exit_code == 0
    assert call().output.startswith("No pools")
    lease.release()
