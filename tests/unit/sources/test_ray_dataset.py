"""Ray Datasets as sources: declarations, identities, and the division of what was made."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.ingested import split as split_source
from vane_dagster.sources import FragmentRule
from vane_dagster.sources.piece_writer import PieceWriter
from vane_dagster.sources.stored_table_source import StoredTableSource
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store
from vane_dagster.storage.stored_tables import MADE, Piece, StoredTable, create_record


def written(source: Any, identity: str, rows: pa.Table) -> Piece:
    with PieceWriter(source.bound.root, MADE) as writer:
        return Piece(identity, len(rows), len(rows) * 8, (writer.write(rows),))


class Counted(StoredTableSource):
    """Makes three files of 10, 40 and 5 rows, and counts how often."""

    kind = "counted"
    calls: list[str | None] = []  # noqa: RUF012 - of the class: a bound source is a copy

    def url_for(self, partition_key: str | None) -> str:
        return "counted rows"

    def identity(self, partition: str | None) -> str:
        return f"id{partition}"

    def make(self, partition: str | None, identity: str, location: str) -> StoredTable:
        self.calls.append(partition)
        pieces = tuple(
            written(self, name, pa.table({"n": [f"{name}{i}" for i in range(count)]}))
            for name, count in (("a", 10), ("b", 40), ("c", 5))
        )
        return StoredTable(pa.schema({"n": pa.string()}), pieces)


@pytest.fixture
def bound(store: Any) -> Any:
    Counted.calls = []
    return Counted().bind(store)


def split(source: Any, rows: int) -> list[list[str]]:
    table = split_source(source, FragmentRule(rows))
    parts = (source.for_workers().read(f, table.schema, "here") for f in table.fragments)
    return [part["n"].to_pylist() for part in parts]


ALL = [*(f"a{i}" for i in range(10)), *(f"b{i}" for i in range(40)), *(f"c{i}" for i in range(5))]


@pytest.mark.parametrize(
    ("rows", "counts"), [(100, [55]), (15, [10, 13, 13, 14, 5]), (45, [10, 45])]
)
def test_small_files_share_a_fragment_and_large_ones_are_cut(bound, rows, counts):
    found = split(bound, rows)
    assert [len(part) for part in found] == counts
    assert [row for part in found for row in part] == ALL


def test_code_that_fails_leaves_nothing_that_is_read(bound, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Counted, "calls", None)
        with pytest.raises(
            vd.errors.SourceError, match=r"here: counted rows failed: AttributeError: "
        ):
            split(bound, 100)
    assert split(bound, 100) == [ALL]
    assert bound.calls == [None]


def test_two_runs_at_once_agree(bound):
    other = StoredTable(pa.schema({"n": pa.string()}), bound.make(None, "idNone", "").pieces[:1])
    create_record(bound.bound.root, "idNone", other)
    assert split(bound, 100) == [ALL[:10]]


def make() -> Any:
    raise AssertionError("a declaration and a listing call no function")


def day(partition_key: str) -> Any:
    raise AssertionError("a declaration and a listing call no function")


def test_a_listing_runs_nothing():
    source = vd.ray_dataset(make)
    (file,) = source.required(source.list_files([None], "here")[None], None, "here")
    assert file.url.startswith("table://")
    days = vd.ray_dataset(day)
    listed = days.list_files(["a", "b"], "here")
    assert listed["a"] != listed["b"]
    assert listed["a"] == days.list_files(["a"], "here")["a"]


def listed(fn: Any, version: str | None = None, name: str | None = None) -> Any:
    source = vd.ray_dataset(fn, version=version)
    if name:
        source = vd.Pipeline(name, source=source, id="id").source
    return source.list_files([None], "here")[None]


def given(*args: Any, **more: Any) -> Any:
    raise AssertionError("a declaration and a listing call no function")


def test_the_identity_is_that_of_the_code_or_of_the_version():
    assert listed(make) == listed(make)
    assert len({listed(make), listed(make, "1"), listed(make, "2")}) == 3
    # A version is one of a pipeline: another function of the same name may have it.
    assert listed(lambda: None, "1", "a") == listed(lambda: 1, "1", "a")
    assert listed(lambda: None, "1", "a") != listed(lambda: None, "1", "b")
    assert listed(make, None, "a") == listed(make, None, "b")
    # Arguments count in both.
    one, two = (functools.partial(lambda n: n, n) for n in (1, 2))
    assert listed(one) != listed(two)
    calls = [((), {}), ((1,), {}), ((2,), {}), ((), {"n": 1}), ((), {"m": 1}), (({"a": 1},), {})]
    found = [listed(functools.partial(given, *args, **more), "1") for args, more in calls]
    assert len(set(found)) == len(found)
    assert listed(functools.partial(given, 1), "1") == found[1]
    values = (listed(functools.partial(given, object()), "1") for _ in range(2))
    assert len({*values}) == 1, "values without an identity count by their type"


def test_code_without_an_identity_is_an_error_of_the_listing():
    source = vd.ray_dataset(functools.partial(lambda lock: lock, threading.Lock()))
    found = source.list_files([None], "here")[None]
    assert isinstance(found, vd.errors.SourceError)
    assert "version=" in str(found)


def test_a_declaration_does_not_import_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    vd.ray_dataset(make).list_files([None], "here")


def test_a_process_that_is_not_connected_makes_no_dataset(tmp_path, monkeypatch):
    source = vd.ray_dataset(make).bind(Store(StoragePath(str(tmp_path))))
    monkeypatch.setattr(importlib.import_module("ray"), "is_initialized", lambda: False)
    with pytest.raises(vd.errors.SourceError, match=r"compute=RayCompute\(...\)"):
        split_source(source, FragmentRule(10))
