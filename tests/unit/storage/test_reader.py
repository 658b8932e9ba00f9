"""Reading what the store holds, in every form; `test_s3.py` has the same on S3."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import vane_dagster as vd

# F403: all tests of the contract run here, on local disk.
from support.reader_contract import *  # noqa: F403  # the contract's tests
from support.stored import (
    FORMS,
    KEYS,
    SCHEMA,
    ids,
    keep,
    local_store,  # noqa: F401  # fixture
    table,
)
from vane_dagster._home import default_root
from vane_dagster.errors import StoreError
from vane_dagster.storage.dataframes import loaded
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.reader import read
from vane_dagster.storage.store import Store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    urls = {"local": str(tmp_path / "store*"), "memory": f"memory://{uuid.uuid4().hex}"}
    return Store(StoragePath(urls[request.param]))


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_types_are_kept(local_store, form):
    keep(local_store, "docs", None, table(0, 3))
    keep(local_store, "none", None, table(0, 0))
    for name, rows in (("docs", 3), ("none", 0)):
        read = vd.load(name, as_=form, store=local_store)
        if form is pd.DataFrame:
            assert list(read.columns) == SCHEMA.names
            assert len(read) == rows
        elif form in (pl.DataFrame, pl.LazyFrame):
            read = read.lazy().collect()
            assert read.schema == pl.Schema(
                {"id": pl.Int64, "text": pl.String, "e": pl.Array(pl.Float32, 2)}
            )
            assert len(read) == rows
        elif form is duckdb.DuckDBPyRelation:
            assert [str(kind) for kind in read.types] == ["BIGINT", "VARCHAR", "FLOAT[2]"]
            assert len(read.fetchall()) == rows
        else:
            read = read.to_table() if isinstance(read, ds.Dataset) else read
            read = read.read_all() if isinstance(read, pa.RecordBatchReader) else read
            assert read == table(0, rows)


@pytest.mark.parametrize("kind", [pa.duration("us"), pa.decimal256(50, 2)], ids=str)
def test_types_that_a_relation_would_change_are_refused(local_store, kind):
    """DuckDB reads durations as integers, and wide decimals as doubles."""
    keep(local_store, "docs", None, pa.table({"id": [1], "x": pa.array([1], kind)}))
    assert vd.load("docs", store=local_store).schema.field("x").type == kind
    form = duckdb.DuckDBPyRelation
    with pytest.raises(vd.errors.StoreError, match=r"column 'x' is .*select other columns"):
        vd.load("docs", as_=form, store=local_store)
    assert ids(vd.load("docs", as_=form, store=local_store, columns=["id"])) == [1]


def test_relations_have_the_same_types_beside_a_tensor(local_store):
    halves = pa.array(np.array([1.5], np.float16))
    others = {"half": halves, "time": pa.array([0], pa.timestamp("s")), "wide": pa.array([1])}
    others["wide"] = others["wide"].cast(pa.decimal256(30, 2))
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4.0).reshape(1, 2, 2))
    keep(local_store, "plain", None, pa.table(others))
    keep(local_store, "docs", None, pa.table({**others, "x": tensors}))
    form = duckdb.DuckDBPyRelation
    plain = vd.load("plain", as_=form, store=local_store)
    beside = vd.load("docs", as_=form, store=local_store)
    assert beside.types == [*plain.types, "DOUBLE[4]"]
    (row,) = plain.fetchall()
    assert beside.fetchall() == [(*row, (0.0, 1.0, 2.0, 3.0))]


def test_lazy_frames_have_arrays_for_tensors(local_store):
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3))
    keep(local_store, "docs", None, pa.table({"id": [1, 2], "x": tensors}))
    frame = vd.load("docs", as_=pl.LazyFrame, store=local_store, partition_column="day")
    assert frame.collect_schema().names() == ["id", "x", "day"]
    assert frame.collect_schema()["x"] == pl.Array(pl.Float64, (2, 3))
    assert frame.filter(pl.col("id") == 2).collect()["x"].to_numpy().tolist() == [
        [[6, 7, 8], [9, 10, 11]]
    ]


def test_what_is_missing_is_named(local_store):
    with pytest.raises(vd.errors.StoreError, match=r"'docs' was never materialized into"):
        vd.load("docs", store=local_store)
    with pytest.raises(vd.errors.StoreError, match=r"docs' was never materialized"):
        vd.quarantine("docs", [], store=local_store)
    for key in KEYS:
        keep(local_store, "docs", key, table(0, 2))
    with pytest.raises(vd.errors.StoreError, match=r"'docs': partitions 'x', 'y' were never"):
        vd.load("docs", ["x", KEYS[0], "y"], store=local_store)
    with pytest.raises(vd.errors.StoreError, match=r"A range is no key: pass a list of all keys$"):
        vd.load("docs", f"{KEYS[0]}..{KEYS[1]}", store=local_store)
    read = vd.load("docs", ["x", KEYS[0]], store=local_store, allow_missing_partitions=True)
    assert ids(read) == [0, 1]
    nothing = vd.load("docs", "x", store=local_store, allow_missing_partitions=True)
    assert nothing == SCHEMA.empty_table()
    with pytest.raises(vd.errors.StoreError, match=r"no column 'x'; it has 'id', 'text', 'e'"):
        vd.load("docs", KEYS[0], columns=["id", "x"], store=local_store)
    with pytest.raises(
        vd.errors.StoreError, match=r"as_ is <class 'dict'>; expected .*polars.LazyFrame"
    ):
        vd.load("docs", as_=dict, store=local_store)


def test_partitions_of_different_columns_are_refused(local_store):
    keep(local_store, "docs", "a", table(0, 2))
    keep(local_store, "docs", "b", table(0, 2).select(["text", "e", "id"]))
    assert vd.load("docs", store=local_store).num_rows == 4, "the order does not matter"
    keep(local_store, "docs", "c", pa.table({"id": ["x"], "text": ["y"]}))
    with pytest.raises(
        vd.errors.StoreError, match=r"column 'id' is int64 in partition 'a', but string"
    ):
        vd.load("docs", store=local_store)
    keep(local_store, "docs", "c", pa.table({"id": [1], "text": ["y"]}))
    with pytest.raises(
        vd.errors.StoreError, match=r"'e' is fixed.*'a', but no such column in partition"
    ):
        vd.load("docs", store=local_store)


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_columns_that_are_not_read_may_differ(local_store, form):
    keep(local_store, "docs", "a", table(0, 2))
    keep(local_store, "docs", "b", pa.table({"text": [1], "id": [2]}))
    read = vd.load("docs", columns=["id"], as_=form, store=local_store)
    assert ids(read) == [0, 1, 2]
    for columns in (["text"], ["id", "e"]):
        with pytest.raises(vd.errors.StoreError, match="in partition 'a', but"):
            vd.load("docs", columns=columns, as_=form, store=local_store)


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_an_empty_partition_has_no_say_in_types(local_store, form):
    keep(local_store, "docs", "a", pa.table({"id": pa.nulls(0), "text": pa.nulls(0)}))
    keep(local_store, "docs", "b", table(0, 2).select(["id", "text"]))
    assert ids(vd.load("docs", as_=form, store=local_store)) == [0, 1]


def test_a_file_that_is_gone_is_told(local_store):
    kept = keep(local_store, "docs", "a", table(0, 3))
    folder = local_store.parts(kept.pipeline, kept.stage, "a")
    folder.delete([part.name for part in kept.parts])
    gone = r"'docs', partition 'a', file '\S+\.parquet': a file is damaged or gone"
    with pytest.raises(vd.errors.StoreError, match=gone):
        vd.load("docs", "a", store=local_store)


def test_rows_are_cut_by_number_and_size_however_they_come(local_store, monkeypatch):
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MAX_ROWS", 512)
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MAX_BYTES", 1 << 20)
    rows = table(0, 1300)
    small = pa.Table.from_batches(rows.to_batches(max_chunksize=7))
    for given in (rows, small, pl.from_arrow(rows).lazy()):
        kept = keep(local_store, "many", None, given)
        assert [part.rows for part in kept.parts] == [512, 512, 276]
        assert kept.content == keep(local_store, "many", None, rows).content
    wide = pa.table({"id": range(1000), "blob": [b"x" * 10_000] * 1000})
    kept = keep(local_store, "wide", None, wide)
    assert [part.rows for part in kept.parts] == [256, 256, 256, 232]
    assert vd.load("wide", store=local_store) == wide


def test_the_default_root(monkeypatch, tmp_path):
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("VANE_DAGSTER_STORE", raising=False)
    assert default_root() == str(tmp_path / "home" / "store")
    assert vd.FragmentStore().open().root.url == str(tmp_path / "home" / "store")
    monkeypatch.setenv("VANE_DAGSTER_STORE", "s3://lake/x")
    assert default_root() == vd.FragmentStore().open().root.url == "s3://lake/x"
    keep(Store(StoragePath(str(tmp_path / "other"))), "docs", None, table(0, 1))
    assert ids(vd.load("docs", store=str(tmp_path / "other"))) == [0]
    assert ids(vd.load("docs", store=vd.FragmentStore(root=str(tmp_path / "other")))) == [0]
    assert ids(vd.load(dg.AssetKey("docs"), store=tmp_path / "other")) == [0]
    for empty in ("", vd.FragmentStore(root="")):
        with pytest.raises(StoreError, match="expected a path or a URL, got ''"):
            vd.load("docs", store=empty)


def test_pandas_with_an_index(local_store):
    frame = pd.DataFrame({"id": [1, 2, 3], "x": ["a", "b", "c"]})
    keep(local_store, "docs", None, frame[frame["id"] > 1])
    assert vd.load("docs", store=local_store).column_names == ["id", "x"]
    keep(local_store, "docs", None, frame.set_index("id"))
    read = vd.load("docs", as_=pd.DataFrame, store=local_store)
    assert read.to_dict("list") == {"id": [1, 2, 3], "x": ["a", "b", "c"]}


def test_rows_that_cannot_be_stored(local_store):
    with pytest.raises(
        vd.errors.StoreError, match=r"docs returned a builtins.list; expected one of pyarrow"
    ):
        keep(local_store, "docs", None, [1])
    twice = pa.table([[1], [2]], names=["id", "id"])
    with pytest.raises(vd.errors.StoreError, match=r"with distinct names"):
        keep(local_store, "docs", None, twice)
    assert not Path(local_store.root.path).exists() or not list(
        Path(local_store.root.path).rglob("*.json")
    )


def test_a_source_that_fails_half_way_leaves_the_former_rows(local_store):
    keep(local_store, "docs", None, table(0, 3))

    def broken() -> Iterator[pa.RecordBatch]:
        yield from table(5, 600).to_batches()
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        keep(local_store, "docs", None, pa.RecordBatchReader.from_batches(SCHEMA, broken()))
    assert ids(vd.load("docs", store=local_store)) == [0, 1, 2]


@pytest.mark.parametrize("form", ["pandas.DataFrame", "ray.data.Dataset"])
def test_a_library_that_is_missing_is_named(local_store, form, monkeypatch):
    keep(local_store, "docs", None, table(0, 3))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(StoreError, match=rf"'docs' cannot be read as {form}: .*pip install '\w+"):
        loaded(read(local_store, ["docs"], None), form)


def test_ray_is_told_of_where_it_is_not_connected(local_store, monkeypatch):
    ray = pytest.importorskip("ray.data", reason="ray is installed without its extra data")
    keep(local_store, "docs", None, table(0, 3))
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    with pytest.raises(
        StoreError, match=r"'docs' cannot be read as ray.data.Dataset.*ray.init\(\)"
    ):
        loaded(read(local_store, ["docs"], None), f"{ray.__name__}.Dataset")
