"""The store, sources and targets on a real S3 API."""

from __future__ import annotations

import uuid
from typing import Any

import dagster as dg
import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vane_dagster as vd
from support.damage import quick  # noqa: F401  # fixture
from support.data import column_of
from support.ingested import listed

# F403: all tests of the contracts run here, on S3.
from support.reader_contract import *  # noqa: F403  # the contract's tests
from support.results import metadata
from support.store_contract import *  # noqa: F403  # the contract's tests
from support.stored import (
    FORMS,
    keep,
    table,
)
from vane_dagster.cli.main import main
from vane_dagster.storage.contents import results
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


@pytest.fixture(params=["s3"])
def root(request: pytest.FixtureRequest, s3: dict[str, Any]) -> StoragePath:
    return StoragePath(f"s3://lake/{uuid.uuid4().hex}", s3)


@pytest.fixture
def store(root: StoragePath) -> Store:
    return Store(root)


@pytest.mark.usefixtures("quick")
def test_a_bucket_or_a_server_that_is_not_there(s3):
    with pytest.raises(vd.errors.StoreError, match=r"'s3://nowhere/x' cannot be written.*Check"):
        StoragePath("s3://nowhere/x", s3).write("f", b"1")
    config = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    options = {**s3, "endpoint_url": "http://127.0.0.1:1", "config_kwargs": config}
    with pytest.raises(vd.errors.StoreError, match=r"'s3://lake/x' cannot be listed"):
        StoragePath("s3://lake/x", options).names()
    listed = vd.parquet("s3://lake/x", storage_options=options).list_files([None], "here")[None]
    with pytest.raises(
        vd.errors.SourceError, match=r"'s3://lake/x' cannot be listed.*the credentials"
    ):
        raise listed


def test_the_objects_that_stand_for_folders_are_no_files(root, s3):
    """The console makes them, and so do other tools."""
    root.child("in", "sub").write("a.parquet", b"PAR1")
    for folder in ("in/", "in/sub/", "in/sub/empty/"):
        root.fs.call_s3("put_object", Bucket="lake", Key=f"{root.path.partition('/')[2]}/{folder}")
    assert root.child("in").listing() == ({}, ["sub"])
    assert root.child("in", "sub").listing()[0].keys() == {"a.parquet"}
    assert root.walk().keys() == {"in/sub/a.parquet"}
    for pattern in ("in", "in/", "in/**", "in/*", "in/*/*"):
        url = f"{root.url}/{pattern}"
        for source in (vd.files(url, storage_options=s3), vd.parquet(url, storage_options=s3)):
            assert [f.url for f in listed(source)] == [f"{root.url}/in/sub/a.parquet"], pattern


def test_the_requests_of_small_operations(root, monkeypatch):
    """Pins `_lsdir` of s3fs: its `ls` of an empty folder lists the parent, with all its folders."""
    requests: list[str] = []
    real = type(root.fs)._call_s3, type(root.fs)._iterdir

    async def call(self: Any, method: str, *given: Any, **options: Any) -> Any:
        requests.append(method)
        return await real[0](self, method, *given, **options)

    async def listed(self: Any, *given: Any, **options: Any) -> Any:
        requests.append("list")
        async for each in real[1](self, *given, **options):
            yield each

    root.write("f", b"1")
    monkeypatch.setattr(type(root.fs), "_call_s3", call)
    monkeypatch.setattr(type(root.fs), "_iterdir", listed)
    for action, made in (
        (lambda: root.child("empty").listing(), ["list"]),
        (root.listing, ["list"]),
        (lambda: root.read("f", is_small=True), ["get_object"]),
        (
            lambda: root.move("f", root.child("b"), "g"),
            ["head_object", "copy_object", "delete_object"],
        ),
    ):
        requests.clear()
        action()
        assert [each for each in requests if each != "list_objects_v2"] == made
    assert root.child("b").read("g") == b"1"


def add_five(batch: pa.Table) -> dict[str, Any]:
    return {"more": pa.compute.add(batch["n"], 5)}


def test_source_store_and_target_on_s3(s3, cluster, monkeypatch):
    base = f"s3://lake/{uuid.uuid4().hex}"
    fs = fsspec.filesystem("s3", **s3)
    for file in range(2):
        table = pa.table({"id": [f"{file}-{n}" for n in range(10)], "n": range(10)})
        with fs.open(f"{base}/src/day=1/{file}.parquet", "wb") as sink:
            pq.write_table(table, sink)
    docs = vd.Pipeline(
        "docs",
        source=vd.parquet(f"{base}/src/day={{partition_key}}", storage_options=s3),
        id="id",
        partitions_def=dg.StaticPartitionsDefinition(["1", "2"]),
        fragment_rows=8,
    )
    even = docs.project("even", ["n"], where="n % 2 = 0")
    more = even.map_batches("more", add_five, schema={"more": "BIGINT"})
    more.write("published", f"{base}/out/{{partition_key}}", storage_options=s3)
    memory = vd.Pipeline("memory", source=vd.table({"id": range(100)}), id="id")
    memory.project("kept", ["id"])
    store = vd.FragmentStore(root=f"{base}/store", storage_options=s3)
    resources = {"compute": vd.RayCompute(cluster=cluster), "store": store}

    # Each is computed once: rows on S3, and rows in memory, which the store holds.
    runs = []
    for computed in (4, 0):
        result = dg.materialize([docs.build_assets()], partition_key="1", resources=resources)
        runs.append(result.run_id)
        assert metadata(result, "more")["fragments_computed"] == computed
        assert metadata(result, "published")["fragments_computed"] == computed
        result = dg.materialize([memory.build_assets()], resources=resources)
        assert bool(metadata(result, "kept")["fragments_computed"]) == bool(computed)

    # What was published is read in every form, and each row leads back to its file.
    out = ds.dataset(f"{base}/out/1"[len("s3://") :], filesystem=fs, format="parquet").to_table()
    expected = [(f"{file}-{n}", n + 5) for file in range(2) for n in range(0, 10, 2)]
    assert sorted(zip(*out.select(["id", "more"]).to_pydict().values())) == expected
    for form in FORMS:
        loaded = vd.load(docs["published"], "1", as_=form, store=store)
        assert sorted(column_of(loaded, "id")) == [id for id, _ in expected]
    assert vd.load("memory/kept", store=store)["id"].to_pylist() == list(range(100))
    traced = vd.trace("docs/more", "1-4", "1", store=store)
    assert [step.stage for step in traced.steps] == ["docs/source", "docs/even", "docs/more"]
    made = traced.steps[2]
    assert (made.run_id, made.committed_by, made.model) == (runs[0], runs[0], "add_five")
    assert made.workers
    assert traced.steps[0].url == f"{base}/src/day=1/1.parquet"
    for step in traced.steps:
        with fs.open(step.url) as file:
            assert pq.read_table(file).slice(step.row, 1)["id"].to_pylist() == ["1-4"]
    arguments = ["trace", "docs/more", "--id", "1-4", "--partition", "1", "--store", store.root]
    monkeypatch.setitem(fsspec.config.conf, "s3", s3)
    shown = CliRunner().invoke(main, arguments)
    assert shown.output == f"{traced}\n"

    # Rows are counted and previewed from there, too.
    counted = docs.plan("1", store=store, rows=True, force=True).stages[1]
    assert (counted.stage, counted.rows, counted.rows_are) == ("more", 10, "exact")
    chosen = {"partition": "1", "where": "n > 4", "compute": resources["compute"]}
    found = docs["more"].preview(2, **chosen, store=store)
    assert found.table["more"].to_pylist() == [11, 13]

    # What the store holds.
    opened = store.open()
    held = {each.stage: (each.partitions, each.rows) for each in results(opened)}
    assert (held["docs/more"], held["memory/kept"]) == ((1, 10), (1, 100))


# Ray Datasets


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_ray_data(s3, ray_data):
    """An asset reads and keeps those of a local store, in test_io_manager.py."""
    store = Store(StoragePath(f"s3://lake/{uuid.uuid4().hex}", s3))
    keep(store, "docs", "a", table(0, 3))
    keep(store, "docs", "b", table(5, 2))
    keep(store, "docs", "day=1", table(0, 0))
    read = vd.load("docs", as_=ray_data.Dataset, store=store, columns=["id"])
    assert isinstance(read, ray_data.Dataset)
    assert read.schema().names == ["id"]
    assert sorted(row["id"] for row in read.take_all()) == [0, 1, 2, 5, 6]
    assert vd.load("docs", "day=1", as_=ray_data.Dataset, store=store).count() == 0
