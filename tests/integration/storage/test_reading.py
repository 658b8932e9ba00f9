"""Reading in runs, on Ray, and in processes that lack a library."""

from __future__ import annotations

import sys
import uuid

import pytest
import ray

import vane_dagster as vd
from support.data import write_source
from support.stored import (
    ids,
    keep,
    local_store,  # noqa: F401  # fixture
    table,
)
from vane_dagster.errors import StoreError
from vane_dagster.storage.dataframes import loaded
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.reader import read
from vane_dagster.storage.store import Store


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_data(local_store, s3, ray_data):
    """An asset reads and keeps those of a local store, in test_io_manager.py."""
    far = Store(Location(f"s3://lake/{uuid.uuid4().hex}", s3))
    for store in (local_store, far):
        keep(store, "docs", "a", table(0, 3))
        keep(store, "docs", "b", table(5, 2))
        keep(store, "docs", "day=1", table(0, 0))
        read = vd.load("docs", as_=ray_data.Dataset, store=store, columns=["id"])
        assert isinstance(read, ray_data.Dataset)
        assert read.schema().names == ["id"]
        if store is far:
            assert sorted(row["id"] for row in read.take_all()) == [0, 1, 2, 5, 6]
        assert vd.load("docs", "day=1", as_=ray_data.Dataset, store=store).count() == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_is_told_of_where_it_is_not_connected(local_store):
    pytest.importorskip("ray.data", reason="ray is installed without its extra data")
    keep(local_store, "docs", None, table(0, 3))
    rows = read(local_store, ["docs"], None)
    ray.shutdown()  # from the head of tests before
    with pytest.raises(
        StoreError, match=r"'docs' cannot be read as ray.data.Dataset.*ray.init\(\)"
    ):
        loaded(rows, "ray.data.Dataset")


@pytest.mark.parametrize("form", ["pandas.DataFrame", "ray.data.Dataset"])
def test_a_library_that_is_missing_is_named(local_store, form, monkeypatch):
    keep(local_store, "docs", None, table(0, 3))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(StoreError, match=rf"'docs' cannot be read as {form}: .*pip install '\w+"):
        loaded(read(local_store, ["docs"], None), form)


def test_a_key_that_was_a_stage_and_is_an_asset(tmp_path, local, materialize):
    write_source(tmp_path / "src", {"id": [1, 2]})
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    docs.project("clean", ["id"])
    store = Store(Location(str(tmp_path / "store")))
    keep(store, "docs/clean", None, table(0, 3))
    assert ids(vd.load("docs/clean", store=store)) == [0, 1, 2]
    assert materialize(docs, local).success
    assert ids(vd.load("docs/clean", store=store)) == [1, 2]
    keep(store, "docs/clean", None, table(7, 1))
    assert ids(vd.load(docs["clean"], store=store)) == [7]
