"""What `write` publishes in each format, as the readers of that format see it."""

from __future__ import annotations

import datetime
import os
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyiceberg.types import StringType

import vane_dagster as vd
from support.arguments import grouped
from support.data import SECRET, write_source
from support.iceberg_tables import catalog_in, opened
from support.published import docs
from support.results import failure, metadata, over
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.lance_table import driver_options
from vane_dagster.storage.paths import published_folder
from vane_dagster.storage.table_options import table_options

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
        """The arguments of `write` for one of `PLACES`."""
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
        """The rows of a target, by the format's own library."""
        where = Location(f"{self.url}/{name}", self.s3)
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


def computed(result: dg.ExecuteInProcessResult) -> set[int]:
    """How many fragments each place computed."""
    return {metadata(result, name)["fragments_computed"] for name in PLACES}


def staged(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "_vane_staging" in path.parts and path.is_file()]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_a_relative_target_is_below_the_folder_of_the_declaration_on_ray_too(
    tmp_path, lake, cluster, materialize, monkeypatch
):
    write_source(tmp_path / "src", rows(range(20)))
    monkeypatch.chdir(tmp_path)
    lake.url = "out"
    assert materialize(lake.pipeline(), vd.RayCompute(cluster=cluster)).success
    lake.url = f"{tmp_path}/out"
    assert lake.all_ids == in_all(range(20))


# Readers


def test_partitions_are_read_by_other_tools(tmp_path, lake, local, materialize, monkeypatch):
    """Also as sources of other pipelines, and by `load` and `trace`."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    keys, store = ["a", "it's"], str(tmp_path / "store")
    for key, first in zip(keys, (0, 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 25)))
        result = materialize(lake.pipeline(keys=keys), local, partition=key)
    ids = [*range(25), *range(100, 125)]
    columns = {**rows(ids), "partition_key": ["a"] * 25 + ["it's"] * 25}
    expected = list(zip(*columns.values()))
    for name, (format, merged) in PLACES.items():
        read = lake.read(name)
        assert read.to_pydict() == {each: columns[each] for each in read.schema.names}, name
        target, found = f"{tmp_path}/{name}", metadata(result, name)
        uri = f"{target}/{published_folder(keys[1])}" if format == "parquet" else target
        assert found["dagster/uri"] == uri
        if format == "delta":
            table = DeltaTable(target)
            assert found["table_version"] == str(table.version()) == "2", "a commit a partition"
            assert table.history(1)[0]["vane_dagster.stage"] == f"docs/{name}"
            assert pl.read_delta(target).sort("id").select(*columns).rows() == expected
            actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
            sizes = {file.stat().st_size for file in Path(target).rglob("*.parquet")}
            assert sizes == {action["size_bytes"] for action in actions}
            counts = sorted((a["min.id"], a["max.id"], a["num_records"]) for a in actions)
            if not merged:
                assert counts[:3] == [(0, 7, 8), (8, 15, 8), (16, 24, 9)], "readers skip files"
        elif format == "lance":
            table = lance.dataset(target)
            assert found["table_version"] == str(table.version) == "3"
            properties = table.read_transaction(3).transaction_properties
            assert properties["vane_dagster.partition"] == "it's"
        elif format == "iceberg":
            table = lake.iceberg(name)
            current = table.current_snapshot()
            assert found["table_version"] == str(current.snapshot_id)
            assert len(table.snapshots()) == 2, "one a partition"
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
    assert computed(materialize(lake.pipeline(keys=keys), local, partition="a")) == {0}
    for source in (
        vd.iceberg(lake.catalog, "db.iceberg", filter="partition_key = 'a' and n > 30"),
        vd.delta(f"{tmp_path}/delta", filter="partition_key = 'a' and n > 30"),
        vd.lance(f"{tmp_path}/lance", filter="partition_key = 'a' and n > 30"),
    ):
        again = vd.Pipeline("again", source=source, id="id")
        again.project("kept", ["partition_key", "text"])
        materialize(again, local)
        found = vd.load(again["kept"], store=store)
        assert sorted(found["id"].to_pylist()) == list(range(4, 25))


def test_types_that_a_format_does_not_have_are_widened(tmp_path, lake, local, materialize):
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    columns = {
        "id": pa.array([1, 2], pa.uint32()),
        "small": pa.array([255, None], pa.uint8()),
        "vector": pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2)),
        "tensor": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.float32(), 4)),
        "at": pa.array([moment, None], pa.timestamp("ms", "Europe/Berlin")),
        "raw": pa.array([b"abc", None], pa.binary(3)),
        "rows": pa.array([[{"a": 1}], []], pa.list_(pa.struct([("a", pa.uint16())]))),
        "price": pa.array([None, None], pa.decimal128(10, 2)),
        "day": pa.array([datetime.date(2026, 1, 1), None]),
        "of": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    }
    expected = pa.table(columns).to_pylist()
    kind = vd.tensor("float32", (2, 2))
    columns["tensor"] = pa.ExtensionArray.from_storage(kind, columns["tensor"])
    write_source(tmp_path / "src", pa.table(columns))
    places = [name for name in PLACES if not name.startswith("parquet")]
    pipeline = lake.pipeline(places, columns=list(columns))
    materialize(pipeline, local)
    for name in places:
        assert lake.read(name).to_pylist() == expected, name
    assert lake.read("lance").schema.field("vector").type == pa.list_(pa.float32(), 2)
    assert vd.load("docs/lance", store=str(tmp_path / "store"))["tensor"].type == kind
    again = materialize(pipeline, local)
    assert {metadata(again, name)["fragments_computed"] for name in places} == {0}


STRANGE = ["a/b", 'it\'s "q" 100%', "..", " x ", "ü=&;`", "a*?{}#", "~\\%2F", "A", "a"]


def test_partition_keys_of_any_characters_stand_in_the_table(tmp_path, lake, local, materialize):
    write_source(tmp_path / "src", rows([1]))
    key, one = (dg.StaticPartitionsDefinition(keys) for keys in (STRANGE, ["src"]))
    both = dg.MultiPartitionsDefinition({"key": key, "one": one})
    keys = both.get_partition_keys()
    expected = sorted(str(key) for key in keys)
    for columns in (["n"], {"n": "n + 1"}):
        pipeline = vd.Pipeline(
            "docs",
            source=vd.parquet(f"{tmp_path}/{{partition_key.one}}"),
            id="id",
            partitions_def=both,
        )
        clean = pipeline.project("clean", columns)
        for name in ("delta", "iceberg", "lance"):
            clean.write(name, **grouped(lake.target(name)))
        assert materialize(pipeline, local, tags=over(*keys)["tags"]).success
        for name in ("delta", "iceberg", "lance"):
            assert sorted(lake.read(name)["partition_key"].to_pylist()) == expected, name
        lance.dataset(f"{tmp_path}/lance").optimize.compact_files()
    assert set(lake.read("lance")["n"].to_pylist()) == {11}
    assert materialize(pipeline, local, partition=keys[0]).success
    assert sorted(pl.read_delta(f"{tmp_path}/delta")["partition_key"]) == expected
    names = {"src", "store", "catalog", "delta", "iceberg", "lance"}
    assert {path.name for path in tmp_path.iterdir()} == names


# Replaced as a whole


def test_partitions_that_are_empty_or_become_so_have_their_columns(
    tmp_path, lake, local, materialize
):
    write_source(tmp_path / "src", rows(range(20)))
    for where, expected in (("id < 0", []), (None, range(20)), ("id < 0", [])):
        materialize(lake.pipeline(where=where), local)
        assert lake.all_ids == in_all(expected)
        assert all(lake.read(name).schema.names == ["id", "n", "text"] for name in PLACES)
    assert computed(materialize(lake.pipeline(where="id < 0"), local)) == {0}


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_published_file_that_is_gone_is_published_again(
    tmp_path, lake, local, materialize, format
):
    write_source(tmp_path / "src", rows(range(60)))
    name, given = f"{format}3000", {"places": [f"{format}3000"]}
    materialize(lake.pipeline(**given), local)
    if format == "delta":
        DeltaTable(tmp_path / name).delete("id < 10")
    else:
        next((tmp_path / name).glob("*.parquet")).unlink()
    assert lake.ids(name) != list(range(60))
    pipeline = lake.pipeline(**given)
    pipeline.project("more", ["n"])
    result = materialize(pipeline, local)

    assert lake.ids(name) == list(range(60))
    assert metadata(result, name)["fragments_computed"] == 6
    assert metadata(result, "clean")["fragments_computed"] == 0
    assert not staged(tmp_path)


def test_checks_read_the_rows_before_they_are_published(tmp_path, lake, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    for expected, passed in ({"id": [15], "n": [150]}, True), ({"id": [15], "n": [151]}, False):
        checks = [vd.checks.Golden(expected)]
        result = materialize(lake.pipeline(checks=checks), local, raises=False)
        evaluations = result.get_asset_check_evaluations()
        found = {e.asset_key.path[-1]: e.passed for e in evaluations if e.check_name == "golden"}
        assert found == dict.fromkeys(PLACES, passed)


# Sizes and codecs


def test_sizes_and_codecs_of_files(tmp_path, local, materialize, monkeypatch):
    """Small fragments are written together, in their order, with a part in memory at once."""
    from vane_dagster.storage.publish import compaction

    monkeypatch.setattr(compaction, "_GROUP_BYTES", 50_000)
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 10_000)
    noise = [os.urandom(100).hex() for _ in range(5_000)]
    write_source(tmp_path / "src", {"id": range(5_000), "n": range(5_000), "text": noise})
    pipeline = docs(tmp_path, fragment_rows=500, target_file_bytes=100_000)
    target = {"target_file_bytes": 1 << 30}
    pipeline["clean"].write("one", f"{tmp_path}/one", compression="gzip", **grouped(target))
    materialize(pipeline, local)
    files = [*(tmp_path / "out").glob("*.parquet")]
    sizes = sorted(path.stat().st_size for path in files)
    assert 4 <= len(sizes) <= 10
    assert 50_000 < sizes[1] <= sizes[-1] < 150_000
    tables = [pq.read_table(path)["id"].to_pylist() for path in files]
    assert [id for ids in sorted(tables) for id in ids] == list(range(5_000))
    (one,) = map(pq.read_metadata, (tmp_path / "one").glob("*.parquet"))
    assert one.num_row_groups > 5
    assert one.row_group(0).column(0).compression == "GZIP"


# Tables that do not fit


def test_what_a_table_cannot_hold_is_refused_before_anything_runs(
    tmp_path, lake, local, materialize
):
    write_source(tmp_path / "src", {**rows(range(20)), "big": pa.array(range(20), pa.uint64())})
    text = failure(materialize(lake.pipeline(["delta"], columns=["big"]), local, raises=False))
    assert "'docs/delta': column 'big' is uint64, which the Delta table cannot hold" in text
    assert "cast it in a project" in text
    assert not list((tmp_path / "store").rglob("*.parquet"))

    materialize(lake.pipeline(["delta"]), local)
    changed = lake.pipeline(["delta"], columns={"n": "n::VARCHAR", "text": "text"})
    text = failure(materialize(changed, local, raises=False))
    assert "'docs/delta': column 'n' is string here, but long in the Delta table" in text
    assert "Make the rows fit with a project, change the table" in text
    assert len(list((tmp_path / "store/docs/clean/manifests").rglob("*.json"))) == 1
    text = failure(materialize(docs(tmp_path, out=f"{tmp_path}/delta"), local, raises=False))
    assert "is a Delta table; publish into it with format='delta'" in text
    assert lake.ids("delta") == list(range(20))


def test_an_iceberg_table_of_others_with_the_columns_is_taken(tmp_path, lake, local, materialize):
    """It has another location, other ids, no name mapping, and files from elsewhere."""
    write_source(tmp_path / "src", rows(range(20)))
    schema = pa.schema([("text", pa.string()), ("n", pa.int64()), ("id", pa.int64())])
    table = opened(lake.catalog).create_table("db.iceberg", schema)
    table.append(pa.table({"text": ["x"], "n": pa.array([1]), "id": pa.array([99])}, schema))
    materialize(lake.pipeline(["iceberg"]), local)
    assert lake.ids("iceberg") == list(range(20))
    with lake.iceberg("iceberg").update_schema() as update:
        update.rename_column("text", "body")
    with lake.iceberg("iceberg").update_schema() as update:
        update.add_column("more", StringType())
    assert lake.read("iceberg")["body"].to_pylist() == [f"text {i}" for i in range(20)]


# Elsewhere


def test_published_on_s3(tmp_path, local, materialize, s3):
    url, keys = f"s3://lake/{uuid.uuid4().hex}/to here", ["a b", "c%2Fd"]
    lake = Lake(tmp_path, url, s3)
    for key, first in zip(keys, (0, 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 40)))
        materialize(lake.pipeline(keys=keys), local, partition=key)
    for expected in ({4}, {0}):
        result = materialize(lake.pipeline(keys=keys, where="id < 7"), local, partition=keys[0])
        assert computed(result) == expected
    assert lake.all_ids == in_all([*range(7), *range(100, 140)])
    for name, (format, _) in PLACES.items():
        if format != "parquet":
            assert sorted(set(lake.read(name)["partition_key"].to_pylist())) == keys
    assert not [path for path in Location(url, s3).walk() if "_vane_staging" in path]
    again = vd.Pipeline("again", source=vd.iceberg(lake.catalog, "db.iceberg"), id="id")
    again.project("kept", ["text"])
    materialize(again, local)
    assert vd.load(again["kept"], store=str(tmp_path / "store")).num_rows == 47
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
