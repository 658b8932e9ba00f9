"""Warm pools on a real Ray cluster over a user's runs: loaded, failed, grown, listed, evicted."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import threadpoolctl
from click.testing import CliRunner
from ray.util import placement_group_table

import vane_dagster as vd
from support.backend_contract import CALL, answer, load, start
from support.pool_models import (  # noqa: F401  # fixtures
    add,
    alive,
    docs,
    listed,
    noted,
    ray_compute,
    rows,
    until,
)
from support.results import failure, metadata
from vane_dagster.cli.main import main
from vane_dagster.compute.api import Worker
from vane_dagster.compute.client import PoolManagerClient, pool_managers
from vane_dagster.compute.ray_backend import RayBackend
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.worker.pools import ModelSpec, PoolSpec


class Environment:
    """Says what its process was given."""

    def __init__(self) -> None:
        import torch

        self.variables = [os.environ[name][::-1] for name in ("VANE_TEST_TOKEN", "VANE_TEST_MODE")]
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
            "variables": [self.variables] * count,
            "gpus": [self.gpus] * count,
            **columns,
        }


COUNTS = ("omp", "blas", "arrow", "torch")
FACTS = {
    "id": "BIGINT", "variables": "VARCHAR[]", "gpus": "VARCHAR", **dict.fromkeys(COUNTS, "BIGINT"),
}  # fmt: skip


@functools.lru_cache
def load_offset(path: str) -> int:
    return int(Path(path).read_text())


def shifted(batch, path):
    """Loads a model on its own, and keeps it in its worker."""
    return {"shifted": [n + load_offset(path) for n in batch["id"].to_pylist()]}


def test_pools_are_loaded_failed_grown_listed_and_evicted(
    tmp_path, ray_compute, materialize, monkeypatch
):
    weights, offset = tmp_path / "weights", tmp_path / "offset.txt"

    def pipeline(concurrency: int) -> vd.Pipeline:
        made = docs(tmp_path)
        add(made, "bad", tmp_path, needs=str(weights), factor=3)
        add(made, "good", tmp_path, concurrency=concurrency)
        kwargs = {"path": str(offset)}
        made.map_batches("moved", shifted, schema={"shifted": "BIGINT"}, fn_kwargs=kwargs)
        if concurrency == 1:
            env = {"env_vars": ["VANE_TEST_TOKEN"], "keyed_env_vars": ["VANE_TEST_MODE"]}
            made.map_batches(
                "told", Environment, schema=FACTS, concurrency=vd.Workers(1, **env),
                batch_format="numpy",
            )  # fmt: skip
        return made

    # A constructor fails: it leaves no pool, and the other branches are committed.
    monkeypatch.setenv("VANE_TEST_TOKEN", "s3cret-of-mine")
    monkeypatch.setenv("VANE_TEST_MODE", "new")
    offset.write_text("10")
    message = failure(materialize(pipeline(1), ray_compute, raises=False))
    assert f"RuntimeError: no weights at {weights}" in message
    assert 'raise RuntimeError(f"no weights at {needs}")' in message, "the user's own traceback"
    labels = sorted(pool["label"] for pool in listed())
    assert labels == ["Environment", "Model", "shifted"], "of the models, the good one's is left"
    assert rows(tmp_path, "good")["out"].to_pylist() == [2 * n for n in range(60)]
    assert rows(tmp_path, "moved")["shifted"].to_pylist() == [n + 10 for n in range(60)]

    # Variables and threads reach the workers.
    (found,) = rows(tmp_path, "told").slice(0, 1).drop_columns("id").to_pylist()
    told = ["s3cret-of-mine"[::-1], "wen"]
    assert found == {"variables": told, "gpus": "", **dict.fromkeys(COUNTS, 2)}

    # The next runs compute what failed, on warm pools, and what a changed file changes.
    loads = noted(tmp_path / "loads")
    weights.touch()
    for offset_of_run in ("200", "10"):
        offset.write_text(offset_of_run)
        materialize(pipeline(1), ray_compute)
        expected = [n + int(offset_of_run) for n in range(60)]
        assert rows(tmp_path, "moved")["shifted"].to_pylist() == expected
    assert rows(tmp_path, "bad")["out"].to_pylist() == [3 * n for n in range(60)]
    assert len(noted(tmp_path / "loads")) == len(loads) + 1

    # A pool that grows keeps its first worker.
    result = materialize(pipeline(2), ray_compute, config={"force": True})
    assert metadata(result, "good")["warm_hits"] == 1
    pids = until(
        lambda: len(found := noted(tmp_path / "loads")) == 3 and {loads[0], found[-1]}, "both load"
    )

    # An operator sees pools and their leases, and evicts what is not leased.
    backend = RayBackend()
    lease = backend.lease("a-run-of-mine", [PoolSpec("leased", "Leased", (1, 1))])

    def call(*args: str) -> Any:
        return CliRunner().invoke(main, ["pools", *args, "--name", "tests"])

    pools = json.loads(call("--json").output)
    (model,) = [pool for pool in pools if {w["pid"] for w in pool["workers"]} == pids]
    (leased,) = [pool for pool in pools if pool["label"] == "Leased"]
    assert {w["state"] for w in model["workers"]} == {"ready"}
    assert sum(w["batches"] for w in model["workers"]) == 24
    assert (model["leases"], leased["leases"]) == ([], ["a-run-of-mine"])
    assert model["stages"] == ["docs/good"]
    assert leased["workers"][0]["state"] in {"starting", "unloaded"}, "its actor may have started"
    assert [pool["label"] for pool in pools if pool["identity"] == "io"] == ["read and write"]
    header, *lines = call().output.splitlines()
    assert header.split() == [
        "POOL", "STAGES", "IDENTITY", "STATE", "ACTORS", "PIDS", "DEVICE", "NODE", "URL", "LEASES",
        "IDLE", "BATCHES", "LOAD",
    ]  # fmt: skip
    assert any(all(str(pid) in line for pid in pids) for line in lines)
    refused = call("evict", "leased")
    assert refused.exit_code == 1
    assert "Leased (leased) is leased by a-run-of-mine; --force ends it" in refused.output
    identity = model["identity"]
    ended = call("evict", identity[:6])
    assert (ended.exit_code, ended.output) == (0, f"Ended Model ({identity}).\n")
    until(lambda: not any(alive(pid) for pid in pids), "the processes end", 10)
    assert call("evict", "nothing").exit_code == 1
    assert call("evict").exit_code == 2

    # Pools whose manager was ended are found, and freed.
    (manager,) = pool_managers().values()
    ray.kill(manager)
    until(lambda: not pool_managers(), "it has ended", 10)
    everything = call("evict", "--all", "--force")
    assert everything.exit_code == 0
    assert "Ended Leased (leased)." in everything.output
    assert call().output.startswith("No pools")
    lease.release()


def ending(folder: Path) -> PoolSpec:
    """A pool whose function notes each id, waits with 0 for the file "go", and ends with 1."""

    def function(batch: pa.Table) -> pa.Table:
        import os
        import time
        from pathlib import Path

        (id,) = batch["id"].to_pylist()
        (Path(folder) / f"{id}").touch()
        while id == 0 and not (Path(folder) / "go").exists():
            time.sleep(0.01)
        if id == 1:
            os._exit(1)
        return batch

    bundle = pack((), (function, (), {}))
    model = ModelSpec("ending", False, bundle.payload)
    return PoolSpec("ending", "ending", (1, 1), slots=2, model=model, archive=bundle.archive)


def begin(lease: Any, worker: Worker, id: int, alone: str = "") -> int:
    return start(lease, worker, CALL, lease.put(pa.table({"id": [id]})), alone=alone)


def test_a_worker_that_two_runs_share_is_ended_by_the_call_alone_that_had_begun(
    ray_compute, tmp_path
):
    backend = RayBackend()
    mine, other = (backend.lease(run, [ending(tmp_path)]) for run in ("mine", "other"))
    (worker,) = mine.workers()
    assert other.workers() == [worker]
    load(mine, worker)

    first = begin(mine, worker, 0)
    until(lambda: (tmp_path / "0").exists(), "it has begun")
    kills = begin(other, worker, 1, "a call")
    queued = [begin(mine, worker, 2, "another"), begin(mine, worker, 3)]
    assert answer(other, other.status(worker)).report is not None
    assert not any((tmp_path / f"{id}").exists() for id in (1, 2, 3)), "one waits, all wait"
    (tmp_path / "go").touch()
    assert answer(mine, first).report is not None
    assert answer(other, kills).cause == "unclear"
    assert not (tmp_path / "2").exists()
    lost: dict[int, str] = {}
    until(lambda: lost.update({d.ticket: d.cause for d in mine.wait(1)}) or len(lost) == 2, "lost")
    assert lost == dict(zip(queued, ["outside", "unclear"]))
    for lease in (mine, other):
        lease.release()
    backend.close()


def test_a_worker_that_a_run_leaves_answers_the_calls_of_others(ray_compute, tmp_path):
    backend = RayBackend()
    mine, other = (backend.lease(run, [ending(tmp_path)]) for run in ("mine", "other"))
    (worker,) = mine.workers()
    load(mine, worker)
    called = begin(other, worker, 0)
    until(lambda: (tmp_path / "0").exists(), "it has begun")
    fresh = mine.replace(worker, at_once=False)
    load(mine, fresh)
    (tmp_path / "go").touch()
    assert answer(other, called).report is not None
    until(lambda: answer(other, begin(other, worker, 2)).cause == "outside", "it has ended")
    assert other.replace(worker) == fresh
    load(other, fresh)
    for lease in (mine, other):
        lease.release()
    backend.close()


def test_the_ranks_of_a_worker_are_reserved_in_a_group_that_ends_with_it(ray_compute):
    backend = RayBackend()
    pool = PoolSpec("ranks", "Ranks", (1, 1), {"CPU": 2.0}, ranks=2)

    def group(worker: str) -> dict[str, Any]:
        groups = placement_group_table().values()
        return next((each for each in groups if each["name"] == worker), {})

    def taken(name: str) -> bool:
        return group(name).get("state") == "CREATED" and not available_cpus()

    def available_cpus() -> float:
        return float(ray.available_resources().get("CPU", 0.0))

    lease = backend.lease("a-run-of-mine", [pool])
    (worker,) = lease.workers()
    until(lambda: taken(worker.name), "both ranks are reserved", 60)
    assert group(worker.name)["bundles"] == {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}

    # A restarted pool manager knows the group, and the group of a lost worker is replaced.
    (manager,) = pool_managers().values()
    ray.kill(manager, no_restart=False)
    replacement = lease.replace(worker)
    until(lambda: taken(replacement.name), "the ranks of the next one are reserved", 60)
    assert group(worker.name)["state"] == "REMOVED"

    lease.release()
    assert until(lambda: PoolManagerClient().call("evict", "ranks"), "it is evicted") == ["ranks"]
    until(lambda: available_cpus() == 2, "its ranks are free", 30)
    backend.close()
