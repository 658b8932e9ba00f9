"""Stages in subprocesses of the run beside stages on a real Ray cluster."""

from __future__ import annotations

import os
import signal

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
    """Kills its process at the first batch that has row 300."""

    def __init__(self, column: str, out: str, more: int, flag: str) -> None:
        super().__init__(column, out, more)
        self.flag = flag

    def __call__(self, batch):
        if 300 in batch["id"] and not os.path.exists(self.flag):
            with open(self.flag, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def double(batch):
    return {"doubled": batch["both"] * 2, "function_parent": np.full(len(batch["id"]), os.getppid())}


def added(rows, name, column, out, more, backend, model=Add, **arguments):
    """Add a stage that adds a number to a column."""
    return rows.map_batches(
        name,
        model,
        schema={name: "BIGINT" for name in (out, f"{out}_pid", f"{out}_parent")},
        batch_format="numpy",
        batch_size=20,
        fn_constructor_kwargs={"column": column, "out": out, "more": more, **arguments},
        execution_backend=backend,
    )


@pytest.fixture
def docs(tmp_path):
    """A pipeline over several fragments of a source."""
    numbers = {"id": range(ROWS), "n": range(ROWS)}
    write_source(tmp_path / "src", pa.table(numbers), row_group_size=200)
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def test_tables_cross_between_ray_and_subprocesses_in_both_directions(
    tmp_path, docs, cluster, materialize
):
    first = added(docs, "first", "n", "one", 1, "ray_actor")
    local = added(first, "local", "one", "two", 10, "subprocess_actor")
    back = added(local, "back", "two", "three", 100, None)
    both = back.join("both", local, columns={"both": "back.three + local.two"}) if False else back
    renamed = both.project("renamed", {"both": "three"})
    renamed.map_batches(
        "doubled",
        double,
        schema={"doubled": "BIGINT", "function_parent": "BIGINT"},
        batch_format="numpy",
        batch_size=20,
        execution_backend="subprocess_task",
    )
    assert materialize(docs, vd.RayCompute(cluster=cluster)).success

    store = tmp_path / "store"
    rows = {name: read_stage(store, "docs", name).sort_by("id") for name in ("first", "local", "back", "doubled")}
    assert all(table["id"].to_pylist() == list(range(ROWS)) for table in rows.values())
    assert rows["local"]["two"].to_pylist() == [n + 11 for n in range(ROWS)]
    assert rows["doubled"]["doubled"].to_pylist() == [2 * (n + 111) for n in range(ROWS)]
    own = {os.getpid()}
    assert set(rows["local"]["two_parent"].to_pylist()) == own
    assert set(rows["doubled"]["function_parent"].to_pylist()) == own
    assert not set(rows["first"]["one_parent"].to_pylist()) & own
    assert not set(rows["back"]["three_parent"].to_pylist()) & own
