"""Ray Datasets as sources, made by Ray Data on a real cluster."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage
from support.results import failure, metadata

pytest.importorskip("ray.data", reason="ray is installed without its extra data")
# Ray Data warns of its own settings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

HELPERS = """
import os

FACTOR = 3

def scaled(batch):
    batch["n"] = batch["id"] * FACTOR
    return batch

def note(text):
    folder = os.environ["CALLS"]
    open(os.path.join(folder, f"{text}-{len(os.listdir(folder))}"), "w").close()
"""
MODULE = """
import numpy as np
import ray_helpers

def make():
    import ray
    ray_helpers.note("made")
    return ray.data.range(2_000, override_num_blocks=4).map_batches(ray_helpers.scaled)

def day(partition_key):
    import ray
    ray_helpers.note(partition_key)
    return ray.data.from_items([dict(id=n, day=partition_key) for n in range(10)])

def images(count, broken=-1):
    import ray
    def fill(batch):
        if broken in batch["id"]:
            raise ValueError("no such row")
        return dict(id=batch["id"], image=np.ones((len(batch["id"]), 2, 3), np.float32))
    return ray.data.range(count).map_batches(fill)

def nothing():
    import pyarrow as pa
    import ray
    return ray.data.from_arrow(pa.table(dict(id=pa.array([], pa.int64()))))

def missing_module():
    import no_such_module

def number():
    return 5
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    folder = tmp_path / "calls"
    folder.mkdir()
    monkeypatch.setenv("CALLS", str(folder))
    return lambda: sorted(path.name for path in folder.iterdir())


@pytest.fixture
def load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Callable[[], list[str]]
) -> Callable[[str], ModuleType]:
    """Imports the user's modules, with the helpers' text in place of the former one."""
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "code").mkdir()

    def loaded(helpers: str = HELPERS) -> ModuleType:
        (tmp_path / "code" / "ray_helpers.py").write_text(helpers)
        (tmp_path / "code" / "ray_defs.py").write_text(MODULE)
        for name in ("ray_helpers", "ray_defs"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("ray_defs")

    return loaded


@pytest.fixture
def ray_compute(cluster: vd.LocalCluster, ray_data: Any) -> vd.RayCompute:
    return vd.RayCompute(cluster=cluster)


def plus(batch: pa.Table) -> dict[str, Any]:
    return {"m": [n + 1 for n in batch["n"].to_pylist()]}


def docs(fn: Any, **given: Any) -> vd.Pipeline:
    source = vd.ray_dataset(fn, **given)
    pipeline = vd.Pipeline("docs", source=source, id="id", fragment_rows=300)
    pipeline.map_batches("plus", plus, schema={"m": "BIGINT"})
    return pipeline


class Held:
    """A function that keeps a CPU while it is warm."""

    def __call__(self, batch: pa.Table) -> dict[str, Any]:
        return {"m": batch["n"]}


def test_a_dataset_is_made_once(tmp_path, load, calls, materialize, ray_compute, local):
    """Also where idle warm workers hold all CPUs."""
    rows = vd.table({"id": range(1_000), "n": range(1_000)})
    first = vd.Pipeline("first", source=rows, id="id", fragment_rows=100)
    first.map_batches("held", Held, schema={"m": "BIGINT"}, concurrency=vd.Workers(2, num_cpus=1))
    assert materialize(first, ray_compute).success

    made = load()
    found = metadata(materialize(docs(made.make), ray_compute), "plus")
    assert (found["dagster/row_count"], found["fragments_computed"]) == (2_000, 8)
    rows = read_stage(tmp_path / "store", "docs", "plus").sort_by("id")
    assert rows["m"].to_pylist() == [3 * n + 1 for n in range(2_000)]

    assert metadata(materialize(docs(made.make), ray_compute), "plus")["fragments_computed"] == 0
    forced = materialize(docs(made.make), local, config={"force": True})
    assert metadata(forced, "plus")["fragments_computed"] == 8
    assert calls() == ["made-0"]

    # A helper in another module is part of the function's code.
    edited = load(HELPERS.replace("FACTOR = 3", "FACTOR = 4"))
    assert metadata(materialize(docs(edited.make), ray_compute), "plus")["fragments_computed"] == 8
    assert calls() == ["made-0", "made-1"]
    rows = read_stage(tmp_path / "store", "docs", "plus").sort_by("id")
    assert rows["m"].to_pylist() == [4 * n + 1 for n in range(2_000)]

    # Of a partitioned dataset, only what is asked for is made.
    days = dg.StaticPartitionsDefinition(["mon", "tue"])
    week = vd.Pipeline("week", source=vd.ray_dataset(made.day), id="id", partitions_def=days)
    week.project("kept", ["day"])
    for day in ("tue", "tue", "mon"):
        materialize(week, ray_compute, day)
    assert calls() == ["made-0", "made-1", "mon-3", "tue-2"]
    assert set(read_stage(tmp_path / "store", "week", "kept", "tue")["day"].to_pylist()) == {"tue"}


def test_a_dataset_that_fails_leaves_nothing_that_is_read(tmp_path, load, materialize, ray_compute):
    def run(fn: Any, **given: Any) -> str:
        pipeline = vd.Pipeline("pictures", source=vd.ray_dataset(fn, **given), id="id")
        columns = ["image"] if isinstance(fn, functools.partial) else ["id"]
        pipeline.project("kept", columns)
        result = materialize(pipeline, ray_compute, raises=False)
        return "" if result.success else failure(result)

    made = load()
    broken = functools.partial(made.images, 10, broken=7)
    assert "images() failed: ValueError: no such row" in run(broken, version="1")
    assert not list(Path(tmp_path, "store").glob("~tables/records/*/*"))
    assert run(functools.partial(made.images, 10), version="1") == ""
    kept = read_stage(tmp_path / "store", "pictures", "kept")
    assert kept["image"].type == vd.tensor("float32", (2, 3)), "arrays keep their shapes"
    assert len(kept) == 10

    assert "missing_module() failed: ModuleNotFoundError" in run(made.missing_module)
    assert "number returned a builtins.int; expected a ray.data.Dataset" in run(made.number)
    assert "knows none of its columns" in run(functools.partial(made.images, 0))
    assert "hold no rows. If that is expected" in run(made.nothing)
    assert run(made.nothing, allow_empty=True) == ""
