"""Adoptions, and what undoes them, that are killed at any operation of the storage."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster import testing
from vane_dagster.storage.adoptions import adoptions
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

ROWS = 30
KILLS = 3
Operation = Literal["write", "read", "list", "delete"]
_READS: tuple[Operation, ...] = ("list", "read")


def plain(batch: Any) -> Any:
    return {"y": [2 * x for x in batch["x"].to_pylist()]}


def other(batch: Any) -> Any:
    return {"y": [x + x for x in batch["x"].to_pylist()]}


def docs(tmp_path: Path, fn: Any) -> vd.Pipeline:
    made = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id", fragment_rows=10)
    stage = made.map_batches("made", fn, schema={"y": "BIGINT"})
    stage.project("last", ["id", "y"])
    return made


def change(tmp_path: Path, undo: bool) -> None:
    store, compute = str(tmp_path / "store"), vd.LocalCompute(num_cpus=1)
    docs(tmp_path, other)["made"].adopt(20, undo=undo, store=store, compute=compute)


def killed(tmp_path: Path, undo: bool, operation: Operation, calls: int, url: str = "*") -> int:
    """Kill the process, or its worker, at an operation; return its exit code, 0 if it ends."""
    with testing.faults(testing.StorageFault(url, "kill", operation, calls=calls)):
        process = multiprocessing.get_context("spawn").Process(target=change, args=[tmp_path, undo])
        process.start()
        process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def is_adopted(tmp_path: Path) -> bool:
    known = adoptions(Store(Location(f"{tmp_path}/store")), "docs").get("made")
    return known is not None and len(known.live) > 0


def parts_in_force(tmp_path: Path) -> list[str]:
    store, found = Store(Location(f"{tmp_path}/store")), []
    for stage in ("made", "last"):
        manifest = store.in_force("docs", stage, None)
        assert manifest is not None
        found += [part.name for part in manifest.parts]
        rows = vd.load(f"docs/{stage}", store=f"{tmp_path}/store")
        assert rows.sort_by("id")["y"].to_pylist() == [2 * x for x in range(ROWS)]
    return found


@pytest.mark.parametrize("undo", [False, True], ids=["adopt", "undo"])
def test_adoptions_that_are_killed(tmp_path: Path, undo: bool) -> None:
    """Each is in force or not, nothing is computed for it, and no row is lost or there twice."""
    write_source(tmp_path / "src", {"id": range(ROWS), "x": range(ROWS)}, row_group_size=10)
    store = str(tmp_path / "store")
    former, edited = docs(tmp_path, plain), docs(tmp_path, other)
    former.run(store=store)
    if undo:
        change(tmp_path, False)
    before = parts_in_force(tmp_path)
    record = "*/undone-*" if undo else "*/adopted-*"
    assert killed(tmp_path, undo, "write", 1, record) == -signal.SIGKILL
    assert is_adopted(tmp_path) == undo
    more: list[tuple[Operation, int]] = [("write", 1), ("write", 2), ("write", 3), ("delete", 1)]
    more += [(kind, number) for kind in _READS for number in range(1, 12)]
    for operation, number in random.sample(more, KILLS):
        killed(tmp_path, undo, operation, number)
        assert parts_in_force(tmp_path) == before
        assert edited.plan(store=store).is_up_to_date == is_adopted(tmp_path)
        if is_adopted(tmp_path) != undo:
            break  # it was not reached, or had ended before
    if is_adopted(tmp_path) == undo:
        change(tmp_path, undo)
    assert is_adopted(tmp_path) != undo
    for pipeline in (former,) if undo else (former, edited):
        pipeline.run(store=store)
        assert parts_in_force(tmp_path) == before
