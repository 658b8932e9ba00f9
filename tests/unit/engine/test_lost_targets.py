"""Targets of `write` stages that others deleted, emptied or created anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from support.data import partitioned, write_source
from support.in_process import committed, compute
from support.reused import upper
from vane_dagster.errors import StoreError
from vane_dagster.planning.planner import plan_run
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.publish.delta import DeltaPublisher
from vane_dagster.storage.store import Store

KEYS = ["a", "b", "c"]


class World:
    """A model whose rows are published into folders and a table."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, Store(StoragePath(str(root / "store")))
        self.docs = partitioned(root / "src", KEYS)
        rows = self.docs.map("upper", upper, include_columns=["text"], output_column="upper")
        rows.write("folder", f"{root}/folder/{{partition_key}}")
        rows.write("table", f"{root}/table", format="delta")
        for key in KEYS:
            self.write(key, key)
        self.run()

    def write(self, key: str, text: str) -> None:
        write_source(self.root / "src" / key, {"id": [1], "text": [text]})

    def run(self) -> dict[str, list[Any]]:
        """Return the partitions that a run publishes, by stage."""
        events = compute(self.docs, self.store, KEYS, keys=KEYS)
        return {s: sorted(e.partition for e in committed(events, s)) for s in ("folder", "table")}

    def plan(self) -> str:
        return str(plan_run(self.docs, tuple(self.docs.stages), KEYS, self.store))

    @property
    def calls(self) -> int:
        return len((self.root / "notes").read_text().splitlines())

    @property
    def rows(self) -> dict[str, list[str]]:
        table = DeltaTable(str(self.root / "table")).to_pyarrow_table()
        tables = {"folder": pq.read_table(self.root / "folder"), "table": table}
        return {name: sorted(rows["upper"].to_pylist()) for name, rows in tables.items()}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return World(tmp_path)


def test_what_was_deleted_is_published_again_without_a_call(tmp_path, world):
    calls = world.calls
    for name in ("folder", "table"):
        shutil.rmtree(tmp_path / name)
    for target in ("folder/{partition_key}", "table"):
        assert (
            f"3 out of date (published files are missing from {tmp_path}/{target})" in world.plan()
        )
    assert world.run() == {"folder": KEYS, "table": KEYS}
    assert world.rows == {"folder": ["A", "B", "C"], "table": ["A", "B", "C"]}
    assert world.calls == calls
    assert world.run() == {"folder": [], "table": []}


def test_a_new_table_gets_the_partitions_that_did_not_change_too(tmp_path, world):
    shutil.rmtree(tmp_path / "table")
    shutil.rmtree(tmp_path / "folder/b")
    world.write("a", "new")
    calls = world.calls
    assert world.run() == {"folder": ["a", "b"], "table": KEYS}
    assert world.rows == {"folder": ["B", "C", "NEW"], "table": ["B", "C", "NEW"]}
    assert world.calls == calls + 1


def test_a_table_is_read_once_for_all_partitions_of_a_plan(world):
    real = DeltaPublisher._opened
    with mock.patch.object(DeltaPublisher, "_opened", autospec=True, side_effect=real) as opened:
        assert world.plan().count("3 of 3 partitions up to date") == 3
        assert opened.call_count == 1
        plan_run(world.docs, ("upper", "folder"), KEYS, world.store)
        assert opened.call_count == 1


def test_a_target_that_cannot_be_read_is_a_warning_of_a_plan(world):
    error = StoreError("no such host")
    with mock.patch.object(DeltaPublisher, "_opened", side_effect=error):
        made = plan_run(world.docs, tuple(world.docs.stages), KEYS, world.store)
    assert str(made).count("3 of 3 partitions up to date") == 3
    assert made.warnings == ["cannot check whether published rows are still there: no such host"]
