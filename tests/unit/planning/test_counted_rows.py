"""Rows that a plan counts by their keys, beside the runs that follow."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import write_source
from support.in_process import InProcessCompute
from support.prompts import Reversed
from vane_dagster.errors import BudgetError
from vane_dagster.providers.base import Answer, Request
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


class Add:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, batch: Any) -> Any:
        return {"y": [x + self.number for x in batch["x"].to_pylist()]}


def less(batch: Any) -> Any:
    return {"z": [y - 1 for y in batch["y"].to_pylist()]}


def numbers(tmp_path: Path, keys: str = "", number: int = 1, reuse: Any = None) -> vd.Pipeline:
    made = vd.Pipeline(
        "numbers",
        source=vd.parquet(str(tmp_path / "src" / ("{partition_key}" if keys else ""))),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition([*keys]) if keys else None,
    )
    even = made.project("even", {"id": "id", "x": "x"}, where="x % 2 = 0")
    added = even.map_batches(
        "added",
        Add,
        columns=["x"],
        schema={"y": "BIGINT"},
        fn_constructor_kwargs={"number": number},
        reuse=reuse,
    )
    last = added.project("last", {"y": "y"}, where="y > 0")
    last.map_batches("less", less, columns=["y"], schema={"z": "BIGINT"})
    return made


def write(tmp_path: Path, rows: dict[int, int], file: str = "a.parquet", key: str = "") -> None:
    folder = tmp_path / "src" / key
    write_source(folder, {"id": [*rows], "x": [*rows.values()]}, file)


def counted(found: Any) -> dict[str, Any]:
    return {s.stage: (s.rows, s.rows_are, s.copied) for s in found.stages if s.fragments}


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_rows_are_counted_through_sql_and_bounded_below_a_model(tmp_path, store):
    write(tmp_path, {id: id for id in range(100)})
    made = numbers(tmp_path)
    assert counted(made.plan(store=store))["added"] == (100, "at_most", 0)
    assert counted(made.plan(store=store, rows=True)) == {
        "even": (100, "exact", 0),
        "added": (50, "exact", 0),
        "last": (50, "at_most", 0),
        "less": (50, "at_most", 0),
    }
    assert not Path(store).exists()
    made.run(store=store, compute=InProcessCompute())

    write(tmp_path, {id: id + 10 for id in range(100)})  # 45 of 50 even numbers are known
    found = made.plan(store=store, rows=True)
    assert counted(found)["added"] == (5, "exact", 45)
    assert "1 of 1 partition: 5 rows in 1 fragment, 45 rows copied from equal ones" in str(found)
    made.run(store=store, compute=InProcessCompute())
    manifest = Store(StoragePath(store)).in_force("numbers", "added", None)
    assert manifest is not None
    assert sum(part.copied for part in manifest.parts) == 45
    assert made.plan(store=store, rows=True).is_up_to_date


def test_rows_downstream_of_copied_ones_are_counted_and_new_ones_bound_the_others(tmp_path, store):
    def plan() -> dict[str, Any]:
        return counted(numbers(tmp_path).plan(store=store, rows=True))

    write(tmp_path, {id: id for id in range(100)})
    numbers(tmp_path).run(store=store, compute=InProcessCompute())
    write(tmp_path, {id: id % 50 for id in range(100)})
    found = plan()
    assert found["added"] == (0, "exact", 50)
    assert found["last"] == (50, "exact", 0)
    assert found["less"] == (0, "exact", 50)
    write(tmp_path, {id: id for id in range(-10, 100)})  # 5 even ones are new, and may be dropped
    found = plan()
    assert found["added"] == (5, "exact", 50)
    assert found["last"] == (55, "at_most", 0)
    assert found["less"] == (5, "at_most", 50)


class Short(Reversed):
    async def submit(self, request: Request) -> Answer:
        return replace(await super().submit(request), text="yes")


def test_a_limit_counts_rows_to_compute_and_names_what_is_only_bounded(tmp_path, store):
    given: Any = {"store": store, "compute": InProcessCompute(), "max_cost": 100}
    model = vd.Model("m", prices={"prompt": 1e6})

    def asked() -> vd.Pipeline:
        made = vd.Pipeline("asked", source=vd.parquet(str(tmp_path / "src")), id="id")
        options: Any = {"provider": Short, "model": model}
        first = made.prompt("first", "{x}", include_columns=["x"], **options)
        yes = first.project("yes", ["x"], where="first = 'yes'")
        yes.prompt("second", "{x}", **options)
        return made

    write(tmp_path, dict.fromkeys(range(60), 1))
    asked().run(**{**given, "max_cost": None})
    write(tmp_path, dict.fromkeys(range(61), 1))  # all rows but one would be copied
    asked().run(**given)
    write(tmp_path, dict.fromkeys(range(61 + 60), 1))  # up to twice the limit, but never less
    with pytest.raises(BudgetError, match=r"cost 4\d to .*run fewer partitions or stages"):
        asked().run(**given)


def test_equal_rows_of_two_fragments_are_counted_once_at_least(tmp_path, store):
    write(tmp_path, {1: 2, 2: 4, 3: 4})
    found = counted(numbers(tmp_path).plan(store=store, rows=True))
    assert found["added"] == (2, "exact", 1)
    write(tmp_path, {4: 6, 5: 4}, "b.parquet")
    made = numbers(tmp_path)
    made.fragment_rows = 3
    plan = made.plan(store=store, rows=True)
    assert counted(plan)["added"] == (4, "at_most", 1)
    assert "at most 4 rows in 2 fragments, 1" in str(plan)


def test_rows_that_cannot_be_read_are_not_counted_and_said(tmp_path, store):
    write(tmp_path, {1: 2, 2: 4})
    made = numbers(tmp_path)
    (file,) = (tmp_path / "src").glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.set_column(0, "id", [[1, 1]]), file)
    found = made.plan(store=store, rows=True)
    assert counted(found)["added"] == (2, "at_most", 0)
    assert "the source has" in str(found)


@pytest.mark.parametrize("seed", [3, 5])
def test_counts_hold_for_the_runs_that_follow(tmp_path, store, seed):
    """Files come and change at random, in partitions that share rows."""
    chance, stored, ids = random.Random(seed), Store(StoragePath(store)), itertools.count()

    def write_some(key: str, file: str) -> None:
        values = [chance.choice([chance.randint(0, 20), next(ids)]) for _ in range(20)]
        write(tmp_path, {next(ids): value for value in values}, file, key)

    for key in "abc":
        write_some(key, "0.parquet")
    for step in range(3):
        made = numbers(tmp_path, "abc", 1 + step // 2, vd.Reuse("rows", partitions=seed % 3))
        made.fragment_rows = 10
        keys = chance.choice(["abc", "a", "bc"])
        before = {(s, k): stored.in_force("numbers", s, k) for s in made.stages for k in keys}
        stages = made.plan([*keys], store=store, rows=True).stages
        made.run([*keys], store=store, compute=InProcessCompute())
        for stage in stages:
            computed = 0
            for key in keys:
                now, former = stored.in_force("numbers", stage.stage, key), before[stage.stage, key]
                assert now is not None
                if former is None or former.run_id != now.run_id:
                    parts = [p for p in now.parts if p.made and p.made.run_id == now.run_id]
                    computed += sum(part.rows_in - part.copied for part in parts)
            assert computed <= stage.rows
            assert computed == stage.rows or stage.rows_are == "at_most"
        write_some(chance.choice("abc"), f"{chance.randint(0, 2)}.parquet")
