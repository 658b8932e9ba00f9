"""Reading what the store holds, in every form, on local disk and on a real S3 API."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import fsspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import column_of, write_source
from vane_dagster._home import default_root
from vane_dagster.storage.asset_writer import AssetRun, write_asset
from vane_dagster.storage.dataframes import batches
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import Published
from vane_dagster.storage.paths import partition_folder
from vane_dagster.storage.store import Store

KEYS = ("2026-01-01", "day=2", "DE / 3")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("e", pa.list_(pa.float32(), 2))])
FORMS = [
    pa.Table,
    ds.Dataset,
    pa.RecordBatchReader,
    pd.DataFrame,
    pl.DataFrame,
    pl.LazyFrame,
    duckdb.DuckDBPyRelation,
]


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return Store(Location(str(tmp_path / "store*")))
    return Store(Location(f"s3://lake/{uuid.uuid4().hex}", request.getfixturevalue("s3")))


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store(Location(str(tmp_path / "store")))


def table(start: int, rows: int) -> pa.Table:
    numbers = range(start, start + rows)
    columns = [list(numbers), [f"t{n}" for n in numbers], [[n, n / 2] for n in numbers]]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA)


def keep(store: Store, path: str, partition: str | None, rows: Any, run_id: str = "run") -> Any:
    asset = AssetRun(path.split("/"), run_id)
    return write_asset(store, asset, partition, batches(rows, path))[0]


def ids(read: Any) -> list[int]:
    return column_of(read, "id")


def columns_of(read: Any) -> list[str]:
    if isinstance(read, (ds.Dataset, pa.RecordBatchReader)):
        return list(read.schema.names)
    if isinstance(read, pl.LazyFrame):
        return read.collect_schema().names()
    return list(getattr(read, "column_names", None) or read.columns)


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_partitions_in_every_form(store, form):
    for number, key in enumerate(KEYS):
        keep(store, "raw/docs", key, table(10 * number, 4))

    one = vd.load("raw/docs", "day=2", as_=form, store=store)
    some = vd.load("raw/docs", ["DE / 3", "2026-01-01"], as_=form, store=store)
    whole = vd.load("raw/docs", as_=form, columns=["text", "id"], store=store)

    assert isinstance(one, form)
    assert columns_of(one) == ["id", "text", "e"]
    assert ids(one) == [10, 11, 12, 13]
    assert ids(some) == [20, 21, 22, 23, 0, 1, 2, 3]
    assert columns_of(whole) == ["text", "id"]
    assert ids(whole) == [0, 1, 2, 3, 20, 21, 22, 23, 10, 11, 12, 13], "sorted by key"


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


@pytest.mark.parametrize("form", [ds.Dataset, pl.LazyFrame, duckdb.DuckDBPyRelation])
def test_lazy_forms_read_the_files_when_they_are_used(local_store, form):
    keep(local_store, "docs", None, table(0, 3))
    read = vd.load("docs", as_=form, store=local_store)
    for file in Path(local_store.root.path).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(Exception, match=r"\.parquet"):
        ids(read)


def test_filters_and_limits_of_a_lazy_frame(store):
    keep(store, "docs", None, table(0, 100))
    frame = vd.load("docs", as_=pl.LazyFrame, store=store)
    assert frame.filter(pl.col("id") > 97).collect()["text"].to_list() == ["t98", "t99"]
    assert ids(frame.head(3)) == [0, 1, 2]
    assert ids(frame.filter(pl.col("id") >= 50).head(2)) == [50, 51]
    assert ids(frame.select("id").tail(1)) == [99]
    assert frame.select(pl.len()).collect().item() == 100


def test_a_relation_keeps_its_connection(store):
    keep(store, "docs", None, table(0, 100))
    derived = vd.load("docs", as_=duckdb.DuckDBPyRelation, store=store).filter("id < 3")
    gc.collect()
    assert ids(derived) == [0, 1, 2]
    assert derived.aggregate("sum(e[2])").fetchall() == [(1.5,)]
    other = vd.load("docs", as_=duckdb.DuckDBPyRelation, store=store)
    assert other.set_alias("o").count("*").fetchall() == [(100,)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_data(local_store, s3, cluster):
    ray_data = pytest.importorskip("ray.data", reason="ray is installed without its extra data")
    far = Store(Location(f"s3://lake/{uuid.uuid4().hex}", s3))
    cluster.connect()
    for store in (local_store, far):
        keep(store, "docs", "a", table(0, 3))
        keep(store, "docs", "b", table(5, 2))
        keep(store, "docs", "day=1", table(0, 0))
        read = vd.load("docs", as_=ray_data.Dataset, store=store, columns=["id"])
        assert isinstance(read, ray_data.Dataset)
        assert sorted(row["id"] for row in read.take_all()) == [0, 1, 2, 5, 6]
        assert read.schema().names == ["id"]
        assert vd.load("docs", "day=1", as_=ray_data.Dataset, store=store).count() == 0
    kept = keep(local_store, "copy", None, vd.load("docs", as_=ray_data.Dataset, store=local_store))
    assert kept.rows == 5
    assert sorted(ids(vd.load("copy", store=local_store))) == [0, 1, 2, 5, 6]


def test_ray_is_told_of_where_it_is_not_connected(local_store):
    keep(local_store, "docs", None, table(0, 3))
    code = f"""
        import ray.data
        from vane_dagster.storage.dataframes import loaded
        from vane_dagster.storage.filesystem import Location
        from vane_dagster.storage.reader import read
        from vane_dagster.storage.store import Store
        rows = read(Store(Location({local_store.root.url!r})), ["docs"], None)
        try:
            loaded(rows, "ray.data.Dataset")
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "StoreError 'docs' cannot be read as ray.data.Dataset" in done.stdout
    assert "ray.init()" in done.stdout


def test_a_library_that_is_missing_is_named(local_store):
    keep(local_store, "docs", None, table(0, 3))
    code = f"""
        import sys
        sys.modules["pandas"] = None
        from vane_dagster.storage.dataframes import loaded
        from vane_dagster.storage.filesystem import Location
        from vane_dagster.storage.reader import read
        from vane_dagster.storage.store import Store
        rows = read(Store(Location({local_store.root.url!r})), ["docs"], None)
        for form in ("pandas.DataFrame", "ray.data.Dataset"):
            try:
                loaded(rows, form)
            except Exception as error:
                print(type(error).__name__, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    frame, dataset = done.stdout.splitlines()
    assert frame.startswith("StoreError 'docs' cannot be read as pandas.DataFrame")
    assert frame.endswith("pip install 'pandas'")
    assert dataset.endswith("pip install 'ray[data]'")


def test_what_is_missing_is_named(local_store):
    with pytest.raises(vd.StoreError, match=r"'docs' was never materialized into"):
        vd.load("docs", store=local_store)
    for key in KEYS:
        keep(local_store, "docs", key, table(0, 2))
    with pytest.raises(vd.StoreError, match=r"'docs': partitions 'x', 'y' were never"):
        vd.load("docs", ["x", KEYS[0], "y"], store=local_store)
    read = vd.load("docs", ["x", KEYS[0]], store=local_store, allow_missing_partitions=True)
    assert ids(read) == [0, 1]
    nothing = vd.load("docs", "x", store=local_store, allow_missing_partitions=True)
    assert nothing == SCHEMA.empty_table()
    with pytest.raises(vd.StoreError, match=r"no column 'x'; it has 'id', 'text', 'e'"):
        vd.load("docs", KEYS[0], columns=["id", "x"], store=local_store)
    with pytest.raises(vd.StoreError, match=r"as_ is <class 'dict'>; expected .*polars.LazyFrame"):
        vd.load("docs", as_=dict, store=local_store)


def test_partitions_of_different_columns_are_refused(local_store):
    keep(local_store, "docs", "a", table(0, 2))
    keep(local_store, "docs", "b", table(0, 2).select(["text", "e", "id"]))
    assert vd.load("docs", store=local_store).num_rows == 4, "the order does not matter"
    keep(local_store, "docs", "c", pa.table({"id": ["x"], "text": ["y"]}))
    with pytest.raises(vd.StoreError, match=r"column 'id' is int64 in partition 'a', but string"):
        vd.load("docs", store=local_store)
    keep(local_store, "docs", "c", pa.table({"id": [1], "text": ["y"]}))
    with pytest.raises(vd.StoreError, match=r"'e' is fixed.*'a', but no such column in partition"):
        vd.load("docs", store=local_store)


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_an_empty_partition_has_no_say_in_types(local_store, form):
    keep(local_store, "docs", "a", pa.table({"id": pa.nulls(0), "text": pa.nulls(0)}))
    keep(local_store, "docs", "b", table(0, 2).select(["id", "text"]))
    assert ids(vd.load("docs", as_=form, store=local_store)) == [0, 1]


def test_a_part_that_no_manifest_names_is_never_read(store):
    kept = keep(store, "docs", "a", table(0, 3))
    folder = store.parts(kept.pipeline, kept.stage, "a")
    sink = pa.BufferOutputStream()
    pq.write_table(table(90, 3), sink)
    folder.write(f"{'a' * 40}-{'b' * 16}.parquet", sink.getvalue())
    for form in FORMS:
        for partition in ("a", None):
            assert ids(vd.load("docs", partition, as_=form, store=store)) == [0, 1, 2]


def test_a_file_that_is_gone_is_told(local_store):
    kept = keep(local_store, "docs", "a", table(0, 3))
    folder = local_store.parts(kept.pipeline, kept.stage, "a")
    folder.delete([part.name for part in kept.parts])
    with pytest.raises(vd.StoreError, match=r"'docs' has files that are gone, as .*\.parquet'"):
        vd.load("docs", "a", store=local_store)


def test_readers_see_one_version_while_it_is_replaced(local_store):
    """Each read is of one manifest, whole."""
    versions = [table(100 * n, 40 + n) for n in range(8)]
    keep(local_store, "docs", "a", versions[0])
    ended = threading.Event()

    def write() -> None:
        for _ in range(4):
            for rows in versions:
                keep(local_store, "docs", "a", rows)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not ended.is_set() or reads < 10:
        assert vd.load("docs", "a", store=local_store) in versions
        reads += 1
    writer.join()
    assert vd.load("docs", "a", store=local_store) == versions[-1]


def test_what_was_published_is_read_where_it_is(store, tmp_path, local):
    """A manifest that says where its rows were published, in files of any names."""
    from dataclasses import replace

    kept = keep(store, "docs", "a", table(0, 0))
    for url in (store.root.child("lake").url, str(tmp_path / "lake")):
        target = Location(url, store.root.storage_options if "://" in url else {})
        sink = pa.BufferOutputStream()
        pq.write_table(table(5, 3), sink)
        target.child("sub").write("x.parquet", sink.getvalue())
        target.write("y.parquet", b"of others")
        published = Published(url, ["sub/x.parquet"], "delta", 3)
        store.commit(replace(kept, pipeline="docs", stage="out", published=published,
                             parts=[replace(kept.parts[0], rows=3)]))  # fmt: skip
        for form in FORMS:
            assert ids(vd.load("docs/out", "a", as_=form, store=store)) == [5, 6, 7]


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


def test_partitions_that_came_later(local_store):
    keep(local_store, "docs", None, table(0, 1))
    keep(local_store, "docs", "a", table(1, 1))
    assert ids(vd.load("docs", store=local_store)) == [1]
    keep(local_store, "docs", None, table(2, 1))
    assert ids(vd.load("docs", store=local_store)) == [2]


def test_large_rows_and_many_rows_are_cut(local_store, monkeypatch):
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MOST_ROWS", 512)
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MOST_BYTES", 1 << 20)
    kept = keep(local_store, "many", None, table(0, 1300))
    assert [part.rows for part in kept.parts] == [512, 512, 276]
    wide = pa.table({"id": range(1000), "blob": [b"x" * 10_000] * 1000})
    kept = keep(local_store, "wide", None, wide)
    assert [part.rows for part in kept.parts] == [256, 256, 256, 232]
    assert vd.load("wide", store=local_store) == wide


def test_files_do_not_depend_on_how_rows_come(local_store):
    rows = table(0, 3000)
    one = keep(local_store, "docs", "a", rows)
    other = keep(local_store, "docs", "b", pa.Table.from_batches(rows.to_batches(max_chunksize=7)))
    frame = keep(local_store, "docs", "c", pl.from_arrow(rows).lazy())
    assert one.content == other.content == frame.content


def test_the_same_rows_twice(local_store, monkeypatch):
    monkeypatch.setattr("vane_dagster.storage.asset_writer._MOST_ROWS", 256)
    rows = pa.table({"id": [1] * 700})
    for form in FORMS:
        kept = keep(local_store, "docs", None, rows)
        assert len({part.name for part in kept.parts}) == 3
        assert ids(vd.load("docs", as_=form, store=local_store)) == [1] * 700


def test_importing_and_loading_imports_nothing_that_was_not_asked_for(local_store):
    keep(local_store, "docs", "a", table(0, 3))
    environment = {**os.environ, "VANE_DAGSTER_STORE": local_store.root.url}
    code = """
        import json, sys
        import vane_dagster as vd
        vd.load, vd.stored
        heavy = ("ray", "torch", "dagster", "pandas", "polars", "deltalake")
        imported = [name for name in heavy if name in sys.modules]
        rows = vd.load("docs", "a", columns=["id"]).num_rows
        imported += [name for name in heavy if name != "pandas" and name in sys.modules]
        vd.FragmentStore
        imported += [name for name in heavy if name in sys.modules]
        print(json.dumps([rows, imported]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [3, ["dagster", "pandas"]], "which pyarrow imports by itself"


def test_the_default_root(monkeypatch, tmp_path):
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("VANE_DAGSTER_STORE", raising=False)
    assert default_root() == str(tmp_path / "home" / "store")
    assert vd.FragmentStore().open().root.url == str(tmp_path / "home" / "store")
    monkeypatch.setenv("VANE_DAGSTER_STORE", "s3://lake/x")
    assert default_root() == vd.FragmentStore().open().root.url == "s3://lake/x"
    keep(Store(Location(str(tmp_path / "other"))), "docs", None, table(0, 1))
    assert ids(vd.load("docs", store=str(tmp_path / "other"))) == [0]
    assert ids(vd.load("docs", store=vd.FragmentStore(root=str(tmp_path / "other")))) == [0]
    assert ids(vd.load(dg.AssetKey("docs"), store=tmp_path / "other")) == [0]


def test_keys_with_any_characters(local_store):
    keys = ["a b", "A b", "../x", "x" * 200, "日本", "~unpartitioned", "a/b", "*", "day=1"]
    for number, key in enumerate(keys):
        keep(local_store, "Ünï/çode", key, table(number, 1))
    for number, key in enumerate(keys):
        for form in FORMS:
            assert ids(vd.load("Ünï/çode", key, as_=form, store=local_store)) == [number]
    assert vd.load("Ünï/çode", store=local_store).num_rows == len(keys)
    assert len({partition_folder(key) for key in keys}) == len(keys)
    assert [path.name for path in Path(local_store.root.path).iterdir()] == ["~assets"]


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_key_that_looks_like_a_column_is_none(local_store, form):
    keep(local_store, "docs", "id=7", table(0, 3))
    assert ids(vd.load("docs", "id=7", as_=form, store=local_store)) == [0, 1, 2]


def test_pandas_with_an_index(local_store):
    frame = pd.DataFrame({"id": [1, 2, 3], "x": ["a", "b", "c"]})
    keep(local_store, "docs", None, frame[frame["id"] > 1])
    assert vd.load("docs", store=local_store).column_names == ["id", "x"]
    keep(local_store, "docs", None, frame.set_index("id"))
    read = vd.load("docs", as_=pd.DataFrame, store=local_store)
    assert read.to_dict("list") == {"id": [1, 2, 3], "x": ["a", "b", "c"]}


def test_rows_that_cannot_be_stored(local_store):
    with pytest.raises(vd.StoreError, match=r"docs: got a builtins.list; expected one of pyarrow"):
        keep(local_store, "docs", None, [1])
    twice = pa.table([[1], [2]], names=["id", "id"])
    with pytest.raises(vd.StoreError, match=r"each of its own name"):
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


def test_memory_file_systems(tmp_path):
    store = Store(Location(f"memory://{uuid.uuid4().hex}"))
    keep(store, "docs", "a", table(0, 3))
    for form in FORMS:
        assert ids(vd.load("docs", "a", as_=form, store=store)) == [0, 1, 2]
    assert fsspec.filesystem("memory").exists(store.root.path)
