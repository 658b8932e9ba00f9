"""Stages in subprocesses of the run beside stages on a real Ray cluster."""

from __future__ import annotations

import os
import signal

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage, write_source
from support.results import failure

ROWS = 600


class Add:
    """Adds a number, and records the process that it runs in and the parent of that process."""

    def __init__(self, column: str, out: str, more: int) -> None:
        self.column, self.out, self.more = column, out, more

    def __call__(self, batch):
        count = len(batch["id"])
        return {
            self.out: batch[self.column] + self.more,
            f"{self.out}_pid": np.full(count, os.getpid()),
            f"{self.out}_parent": np.full(count, os.getppid()),
        }


class Dies(Add):
    def __init__(self, column: str, out: str, more: int, flag: str) -> None:
        super().__init__(column, out, more)
        self.flag = flag

    def __call__(self, batch):
        if 300 in batch["id"] and not os.path.exists(self.flag):
            with open(self.flag, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def double(batch):
    return {
        "doubled": batch["both"] * 2,
        "function_parent": np.full(len(batch["id"]), os.getppid()),
    }


def added(rows, name, column, out, more, backend, model=Add, checks=(), held=None, **arguments):
    return rows.map_batches(
        name,
        model,
        schema=dict.fromkeys((out, f"{out}_pid", f"{out}_parent"), "BIGINT"),
        batch_format="numpy",
        batch_size=20,
        fn_constructor_kwargs={"column": column, "out": out, "more": more, **arguments},
        concurrency=vd.Workers(resources=held, execution_backend=backend),
        asset=vd.Asset(checks=checks),
    )


@pytest.fixture
def docs(tmp_path):
    numbers = {"id": range(ROWS), "n": range(ROWS)}
    write_source(tmp_path / "src", pa.table(numbers), row_group_size=100)
    source = vd.parquet(str(tmp_path / "src"))
    return vd.Pipeline("docs", source=source, id="id", fragment_rows=100)


def numbers(tmp_path, stage):
    rows = read_stage(tmp_path / "store", "docs", stage).sort_by("id")
    assert rows["id"].to_pylist() == list(range(ROWS))
    return rows


def test_tables_cross_in_both_directions_and_a_killed_worker_loses_no_row(
    tmp_path, docs, cluster, materialize
):
    """The other side reads what the replaced worker has made, and what it was to read.

    A check computes rows again in the place of their stage: on Ray, the parent is another process.
    The cluster has an accelerator, and no license; the machine has a license if it says so.
    """
    flag = tmp_path / "killed"
    first = added(docs, "first", "n", "one", 1, "ray_actor", held={"accelerator": 1})
    checks = [vd.checks.Reproducible(rows=50, columns=["two", "two_parent"])]
    own = {"flag": str(flag), "held": {"license": 1}, "checks": checks}
    local = added(first, "local", "one", "two", 10, "subprocess_actor", Dies, **own)
    back = added(local, "back", "two", "three", 100, None)
    renamed = back.project("renamed", {"both": "three"})
    renamed.map_batches(
        "doubled",
        double,
        schema={"doubled": "BIGINT", "function_parent": "BIGINT"},
        batch_format="numpy",
        batch_size=20,
        concurrency=vd.Workers(execution_backend="subprocess_task"),
    )
    message = failure(materialize(docs, vd.RayCompute(cluster=cluster), raises=False))
    assert "stage 'docs/local': Dies asks for a worker of 1 license; this machine has 0 " in message
    assert "see `subprocesses` of RayCompute" in message
    machine = vd.LocalCompute(resources={"license": 1})
    compute = vd.RayCompute(cluster=cluster, subprocesses=machine)
    assert materialize(docs, compute).success
    key = dg.AssetCheckKey(local.key, "reproducible")
    again = materialize(docs, compute, select=dg.AssetSelection.checks(key))
    (evaluation,) = again.get_asset_check_evaluations()
    assert evaluation.passed

    assert numbers(tmp_path, "local")["two"].to_pylist() == [n + 11 for n in range(ROWS)]
    assert numbers(tmp_path, "local")["two_pid"].to_pylist()[300] != int(flag.read_text())
    doubled = numbers(tmp_path, "doubled")
    assert doubled["doubled"].to_pylist() == [2 * (n + 111) for n in range(ROWS)]
    own = {os.getpid()}
    assert set(numbers(tmp_path, "local")["two_parent"].to_pylist()) == own
    assert set(doubled["function_parent"].to_pylist()) == own
    assert not set(numbers(tmp_path, "first")["one_parent"].to_pylist()) & own
    assert not set(numbers(tmp_path, "back")["three_parent"].to_pylist()) & own
