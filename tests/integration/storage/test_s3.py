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

import vane_dagster as vd
from support.data import SECRET, column_of
from support.results import metadata

# F403: all tests of the contract run here, on S3.
from support.store_contract import *  # noqa: F403  # the contract's tests
from support.stored import FORMS
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


@pytest.fixture(params=["s3"])
def root(request: pytest.FixtureRequest, s3: dict[str, Any]) -> Location:
    """An empty folder."""
    return Location(f"s3://lake/{uuid.uuid4().hex}", s3)


@pytest.fixture
def store(root: Location) -> Store:
    return Store(root)


def test_a_bucket_that_is_not_there(s3):
    with pytest.raises(vd.errors.StoreError, match=r"'s3://nowhere/x' cannot be written.*Check"):
        Location("s3://nowhere/x", s3).write("f", b"1")


def test_a_server_that_is_not_there(s3):
    config = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    options = {**s3, "endpoint_url": "http://127.0.0.1:1", "config_kwargs": config}
    with pytest.raises(vd.errors.StoreError, match=r"'s3://lake/x' cannot be listed"):
        Location("s3://lake/x", options).names()
    listed = vd.parquet("s3://lake/x", storage_options=options).list_files([None], "here")[None]
    with pytest.raises(
        vd.errors.SourceError, match=r"'s3://lake/x' cannot be listed.*the credentials"
    ):
        raise listed


def test_credentials_are_not_shown(s3):
    assert SECRET not in repr(Location("s3://lake", s3))
    assert SECRET not in repr(vd.parquet("s3://lake", storage_options=s3))


# End to end


class Add:
    def __init__(self, amount: int) -> None:
        self.amount = amount

    def __call__(self, batch):
        return {"more": batch["n"] + self.amount}


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_source_store_and_target_on_s3(s3, kind, request):
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
    more = even.map_batches(
        "more",
        Add,
        schema={"more": "BIGINT"},
        concurrency=1,
        batch_format="numpy",
        fn_constructor_kwargs={"amount": 5},
    )
    joined = docs.join("joined", even, more)
    joined.write("published", f"{base}/out/{{partition_key}}", storage_options=s3)
    if kind == "local":
        compute: Any = request.getfixturevalue("local")
    else:
        compute = vd.RayCompute(cluster=request.getfixturevalue("cluster"))

    def run() -> dg.ExecuteInProcessResult:
        return dg.materialize(
            [docs.build_assets()],
            partition_key="1",
            resources={
                "compute": compute,
                "store": vd.FragmentStore(root=f"{base}/store", storage_options=s3),
            },
        )

    first = run()
    out = ds.dataset(f"{base}/out/1"[len("s3://") :], filesystem=fs, format="parquet").to_table()
    rows = sorted(zip(out["id"].to_pylist(), out["n"].to_pylist(), out["more"].to_pylist()))
    assert rows == sorted(
        (f"{file}-{n}", n, n + 5) for file in range(2) for n in range(10) if n % 2 == 0
    )
    assert metadata(first, "more")["fragments_computed"] == 4
    assert metadata(first, "published")["dagster/uri"] == f"{base}/out/1"
    store = vd.FragmentStore(root=f"{base}/store", storage_options=s3)
    for form in FORMS:
        loaded = vd.load(docs["published"], "1", as_=form, store=store)
        assert sorted(column_of(loaded, "id")) == [id for id, *_ in rows]
    again = run()
    assert metadata(again, "more")["fragments_computed"] == 0
    assert metadata(again, "published")["fragments_reused"] == 4
