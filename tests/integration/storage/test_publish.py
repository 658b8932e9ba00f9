"""What `write` publishes in each format, as the readers of that format see it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

import vane_dagster as vd
from support.arguments import grouped
from support.data import SECRET, write_source
from support.iceberg_tables import catalog_in, opened
from support.in_process import InProcessCompute
from support.published import docs
from support.results import metadata
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.paths import published_folder
from vane_dagster.storage.table_options import driver_options, table_options

PLACES = {
    f"{format}{size}": (format, size)
    for format in ("parquet", "delta", "iceberg", "lance")
    for size in ("", 3000)
}


def rows(ids: Any) -> dict[str, Any]:
    return {"id": list(ids), "n": [i * 10 for i in ids], "text": [f"text {i}" for i in ids]}


class Lake:
    """A target of each format, with files as they are and merged ones, below a URL."""

    def __init__(self, root: Path, url: str = "", s3: dict[str, Any] | None = None) -> None:
        self.root, self.url, self.s3 = root, url or str(root), s3 or {}
        self.catalog = catalog_in(root / "catalog")
        if s3:
            names = {"endpoint": "endpoint_url", "access-key-id": "key"}
            names |= {"secret-access-key": "secret"}
            self.catalog |= {f"s3.{name}": s3[given] for name, given in names.items()}
            self.catalog |= {"s3.region": "us-east-1", "warehouse": url}

    def target(self, name: str, keys: Any = None) -> dict[str, Any]:
        format, size = PLACES[name]
        below = "/{partition_key}" if keys and format == "parquet" else ""
        own: dict[str, Any] = {"target_file_bytes": size} if size else {}
        if format == "iceberg":  # the catalog's properties say how its storage is reached
            own |= {"catalog": self.catalog, "table": f"db.{name}"}
        else:
            own["storage_options"] = self.s3
        return {"url": f"{self.url}/{name}{below}", "format": format, **own}

    def pipeline(self, places: Any = PLACES, checks: Any = (), **given: Any) -> vd.Pipeline:
        made = docs(self.root, **given)
        for name in places:
            target = self.target(name, given.get("keys"))
            made["clean"].write(name, asset=vd.Asset(checks=checks), **grouped(target))
        return made

    def iceberg(self, name: str) -> Any:
        return opened(self.catalog).load_table(f"db.{name}")

    def read(self, name: str) -> pa.Table:
        where = StoragePath(f"{self.url}/{name}", self.s3)
        if name.startswith("parquet"):
            given = {"filesystem": where.fs, "exclude_invalid_files": True}
            read = ds.dataset(where.path, **given).to_table()
        elif name.startswith("delta"):
            options = table_options(where) if self.s3 else None
            table = DeltaTable(where.url, storage_options=options)
            read = table.to_pyarrow_dataset().to_table()
        elif name.startswith("lance"):
            options = driver_options(where) if self.s3 else None
            read = lance.dataset(where.url, storage_options=options).to_table()
        else:
            read = self.iceberg(name).scan().to_arrow()
        return read.sort_by("id")

    def ids(self, name: str) -> list[int]:
        return self.read(name)["id"].to_pylist()

    @property
    def all_ids(self) -> dict[str, list[int]]:
        return {name: self.ids(name) for name in PLACES}


def in_all(ids: Any) -> dict[str, list[int]]:
    return {name: list(ids) for name in PLACES}


def computed(result: dg.ExecuteInProcessResult, places: Any = PLACES) -> set[int]:
    return {metadata(result, name)["fragments_computed"] for name in places}


def staged(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "_vane_staging" in path.parts and path.is_file()]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_partitions_are_published_on_ray_and_read_by_other_tools(
    tmp_path, lake, cluster, materialize, monkeypatch
):
    """Relative targets are below the folder of the declaration. `load` and `trace` follow them."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    monkeypatch.chdir(tmp_path)
    keys, store = ["a", "it's"], str(tmp_path / "store")
    local = InProcessCompute()
    for key, first in zip(keys, (0, 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 25)))

    # The first partition is empty at first, on Ray; tables have their columns.
    lake.url, ray = "out", vd.RayCompute(cluster=cluster)
    materialize(lake.pipeline(keys=keys, where="id < 0"), ray, partition="a")
    lake.url = f"{tmp_path}/out"
    assert lake.all_ids == in_all([])
    for name in PLACES:
        assert {"id", "n", "text"} <= {*lake.read(name).schema.names}

    # Both have rows, which checks see before they are published.
    materialize(lake.pipeline(keys=keys), local, partition="a")
    checks = [vd.checks.Golden({"id": [105], "n": [1051]})]
    given = {"partition": "it's", "raises": False}
    result = materialize(lake.pipeline(keys=keys, checks=checks), local, **given)
    evaluations = result.get_asset_check_evaluations()
    found = {e.asset_key.path[-1]: e.passed for e in evaluations if e.check_name == "golden"}
    assert found == dict.fromkeys(PLACES, False)

    # Other tools read them.
    ids = [*range(25), *range(100, 125)]
    columns = {**rows(ids), "partition_key": ["a"] * 25 + ["it's"] * 25}
    expected = list(zip(*columns.values()))
    for name, (format, merged) in PLACES.items():
        read = lake.read(name)
        assert read.to_pydict() == {each: columns[each] for each in read.schema.names}, name
        target, found = f"{lake.url}/{name}", metadata(result, name)
        uri = f"{target}/{published_folder(keys[1])}" if format == "parquet" else target
        assert found["dagster/uri"] == uri
        if format == "delta":
            table = DeltaTable(target)
            assert found["table_version"] == table.version() == 2, "a commit a partition"
            assert table.history(1)[0]["vane_dagster.stage"] == f"docs/{name}"
            assert pl.read_delta(target).sort("id").select(*columns).rows() == expected
            actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
            sizes = {file.stat().st_size for file in Path(target).rglob("*.parquet")}
            assert sizes >= {action["size_bytes"] for action in actions}
            counts = sorted((a["min.id"], a["max.id"], a["num_records"]) for a in actions)
            if not merged:
                assert counts[:3] == [(0, 7, 8), (8, 15, 8), (16, 24, 9)], "readers skip files"
        elif format == "lance":
            table = lance.dataset(target)
            assert found["table_version"] == table.version
            properties = table.read_transaction(table.version).transaction_properties
            assert properties["vane_dagster.partition"] == "it's"
        elif format == "iceberg":
            table = lake.iceberg(name)
            current = table.current_snapshot()
            assert found["table_version"] == current.snapshot_id
            assert current.summary["vane_dagster.partition"] == "it's"
            assert current.summary["total-records"] == "50"
            by_polars = pl.scan_iceberg(table).sort("id").select(*columns).collect()
            assert by_polars.rows() == expected
            first = table.scan(row_filter="id < 2 and partition_key = 'a'").plan_files()
            assert len(list(first)) == 1, "bounds let readers skip files"
        assert vd.load(f"docs/{name}", "a", store=store)["id"].to_pylist() == ids[:25]
        step = vd.trace(f"docs/{name}", 103, store=store, partition="it's").steps[0]
        assert step.url.endswith("src/it's/a.parquet")
    assert not staged(tmp_path)
    for source in (
        vd.iceberg(lake.catalog, "db.iceberg", filter="partition_key = 'a' and n > 30"),
        vd.delta(f"{lake.url}/delta", filter="partition_key = 'a' and n > 30"),
        vd.lance(f"{lake.url}/lance", filter="partition_key = 'a' and n > 30"),
    ):
        again = vd.Pipeline("again", source=source, id="id")
        again.project("kept", ["partition_key", "text"])
        materialize(again, local)
        found = vd.load(again["kept"], store=store)
        assert sorted(found["id"].to_pylist()) == list(range(4, 25))

    # A run without changes publishes nothing. Files that are gone are published again.
    assert computed(materialize(lake.pipeline(keys=keys), local, partition="a")) == {0}
    DeltaTable(f"{lake.url}/delta3000").delete("id < 10")
    next(Path(lake.url, "parquet3000", "a").glob("*.parquet")).unlink()
    pipeline = lake.pipeline(keys=keys)
    pipeline.project("more", ["n"])  # else the run has nothing to do
    result = materialize(pipeline, local, partition="a")
    assert metadata(result, "clean")["fragments_computed"] == 0
    for name in PLACES:
        lost = 3 if name in ("delta3000", "parquet3000") else 0
        assert metadata(result, name)["fragments_computed"] == lost
    assert lake.all_ids == in_all(ids)
    assert not staged(tmp_path)


def test_published_on_s3(tmp_path, local, materialize, s3):
    url, keys = f"s3://lake/{uuid.uuid4().hex}/to here", ["a b", "c%2Fd"]
    lake, places = Lake(tmp_path, url, s3), ("parquet3000", "delta", "iceberg", "lance3000")
    for key, first in zip(keys, (0, 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 40)))
        materialize(lake.pipeline(places, keys=keys), local, partition=key)
    for expected in ({4}, {0}):
        changed = lake.pipeline(places, keys=keys, where="id < 7")
        assert computed(materialize(changed, local, partition=keys[0]), places) == expected
    for name in places:
        assert lake.ids(name) == [*range(7), *range(100, 140)]
        if name != "parquet3000":
            assert sorted(set(lake.read(name)["partition_key"].to_pylist())) == keys
    assert not [path for path in StoragePath(url, s3).walk() if "_vane_staging" in path]
    sources = {
        "iceberg": vd.iceberg(lake.catalog, "db.iceberg"),
        "delta": vd.delta(f"{url}/delta", storage_options=s3),
        "lance": vd.lance(f"{url}/lance3000", storage_options=s3),
    }
    for name, source in sources.items():
        again = vd.Pipeline(f"again_{name}", source=source, id="id")
        again.project("kept", ["text"])
        for is_new in (True, False):
            found = metadata(materialize(again, local), "kept")
            assert bool(found["fragments_computed"]) == is_new
        assert vd.load(again["kept"], store=str(tmp_path / "store")).num_rows == 47
        step = vd.trace(again["kept"], 103, store=str(tmp_path / "store")).steps[0]
        assert step.url.startswith("s3://lake/")
        assert step.row is not None
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
