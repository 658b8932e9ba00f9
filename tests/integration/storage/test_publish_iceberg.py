"""What `write` publishes into Iceberg tables, as other tools read them."""

from __future__ import annotations

import datetime
import uuid
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.table import Table
from pyiceberg.types import StringType

import vane_dagster as vd
from support.data import SECRET, write_source
from support.iceberg_tables import catalog_in, opened
from support.published import docs
from support.results import failure, metadata


def rows(ids: Any) -> dict[str, Any]:
    return {"id": list(ids), "n": [i * 10 for i in ids], "text": [f"text {i}" for i in ids]}


def published(root: Path, **given: Any) -> vd.Pipeline:
    """Publish into the table db.out of a catalog in the folder."""
    target = {"format": "iceberg", "catalog": catalog_in(root / "lake"), "table": "db.out"}
    return docs(root, **{"out": f"{root}/out", **target, **given})


def table_in(root: Path) -> Table:
    return opened(catalog_in(root / "lake")).load_table("db.out")


def read(root: Path) -> list[int]:
    return sorted(table_in(root).scan().to_arrow()["id"].to_pylist())


def staged(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "_vane_staging" in path.parts and path.is_file()]


@pytest.mark.parametrize("target", [None, 3000])
def test_a_table_is_read_by_its_readers(tmp_path, compute, materialize, monkeypatch, target):
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    for key in ("a", "it's"):
        write_source(tmp_path / "src" / key, rows(range(25)))
        pipeline = published(tmp_path, keys=["a", "it's"], target_file_bytes=target)
        result = materialize(pipeline, compute, partition=key)
        assert metadata(result, "out")["dagster/uri"] == f"{tmp_path}/out"

    table = table_in(tmp_path)
    current = table.current_snapshot()
    assert current is not None
    assert metadata(result, "out")["table_version"] == str(current.snapshot_id)
    assert len(table.snapshots()) == 2, "one a partition"
    assert current.summary is not None
    assert current.summary["vane_dagster.stage"] == "docs/out"
    assert current.summary["vane_dagster.partition"] == "it's"
    assert current.summary["total-records"] == "50"
    names = ["id", "n", "text", "partition_key"]
    expected = [(i, i * 10, f"text {i}", key) for key in ("a", "it's") for i in range(25)]
    found = table.scan().to_arrow().sort_by([("partition_key", "ascending"), ("id", "ascending")])
    assert list(zip(*(found[name].to_pylist() for name in names))) == expected
    connection = table.scan(row_filter="partition_key = 'a' and id < 3").to_duckdb("out")
    assert connection.sql("SELECT count(*), max(n) FROM out").fetchall() == [(3, 20)]
    by_polars = pl.scan_iceberg(table).sort("partition_key", "id").select(names).collect()
    assert by_polars.rows() == expected
    # Bounds in the manifests let readers skip files.
    assert len(list(table.scan(row_filter="id < 2 and partition_key = 'a'").plan_files())) == 1
    assert not staged(tmp_path)


def test_a_published_table_is_read_as_a_source(tmp_path, local, materialize):
    keys = ["a", "b"]
    for key, first in (("a", 0), ("b", 100)):
        write_source(tmp_path / "src" / key, rows(range(first, first + 10)))
        materialize(published(tmp_path, keys=keys), local, partition=key)
    catalog = catalog_in(tmp_path / "lake")
    source = vd.iceberg(catalog, "db.out", filter="partition_key = 'b' and n > 1030")
    again = vd.Pipeline("again", source=source, id="id")
    again.project("kept", ["partition_key", "text"])
    materialize(again, local)
    found = vd.load(again["kept"], store=str(tmp_path / "store")).sort_by("id")
    assert found["id"].to_pylist() == list(range(104, 110))
    assert set(found["partition_key"].to_pylist()) == {"b"}
    loaded = vd.load("docs/out", store=str(tmp_path / "store"), partition="a")
    assert sorted(loaded["id"].to_pylist()) == list(range(10))
    step = vd.trace("docs/out", 103, store=str(tmp_path / "store"), partition="b").steps[0]
    assert step.url is not None
    assert step.url.endswith("src/b/a.parquet")


@pytest.mark.parametrize("target", [None, 10_000])
def test_types(tmp_path, local, materialize, target):
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.uint32()),
            "small": pa.array([255, None], pa.uint8()),
            "vector": pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2)),
            "at": pa.array([moment, None], pa.timestamp("ms", "Europe/Berlin")),
            "raw": pa.array([b"abc", None], pa.binary(3)),
            "rows": pa.array([[{"a": 1}], []], pa.list_(pa.struct([("a", pa.uint16())]))),
            "price": pa.array([None, None], pa.decimal128(10, 2)),
            "day": pa.array([datetime.date(2026, 1, 1), None]),
            "of": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    write_source(tmp_path / "src", table)
    pipeline = published(tmp_path, columns=table.column_names, target_file_bytes=target)
    materialize(pipeline, local)
    found = table_in(tmp_path).scan().to_arrow().sort_by("id").to_pylist()
    assert found[0] == {
        "id": 1,
        "small": 255,
        "vector": [1.5, 2.5],
        "at": moment,
        "raw": b"abc",
        "rows": [{"a": 1}],
        "price": None,
        "day": datetime.date(2026, 1, 1),
        "of": [("k", 1)],
    }
    assert (found[1]["raw"], found[1]["vector"], found[1]["of"]) == (None, None, None)
    assert metadata(materialize(pipeline, local), "out")["fragments_computed"] == 0


def test_a_table_of_other_partitions_is_refused(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(20)))
    materialize(published(tmp_path), local)
    write_source(tmp_path / "src/a", rows(range(20)))
    other = published(tmp_path, keys=["a"])
    text = failure(materialize(other, local, partition="a", raises=False))
    assert "is partitioned by [], expected ['identity(partition_key)']" in text
    assert read(tmp_path) == list(range(20))


def test_a_table_of_others_with_the_columns_is_taken(tmp_path, local, materialize):
    """It has another location, other ids, no name mapping, and files from elsewhere."""
    write_source(tmp_path / "src", rows(range(20)))
    catalog = opened(catalog_in(tmp_path / "lake"))
    schema = pa.schema([("text", pa.string()), ("n", pa.int64()), ("id", pa.int64())])
    table = catalog.create_table("db.out", schema)
    table.append(pa.table({"text": ["x"], "n": pa.array([1]), "id": pa.array([99])}, schema))
    materialize(published(tmp_path), local)
    assert read(tmp_path) == list(range(20))
    with table_in(tmp_path).update_schema() as update:
        update.rename_column("text", "body")
    with table_in(tmp_path).update_schema() as update:
        update.add_column("more", StringType())
    found = table_in(tmp_path).scan().to_arrow().sort_by("id")
    assert found["body"].to_pylist() == [f"text {i}" for i in range(20)]


# Elsewhere


def test_published_on_s3(tmp_path, local, materialize, s3_endpoint):
    import s3fs

    bucket = f"lake-{uuid.uuid4().hex}"
    storage = {
        "s3.endpoint": s3_endpoint,
        "s3.access-key-id": "someone",
        "s3.secret-access-key": SECRET,
        "s3.region": "us-east-1",
    }
    fs = s3fs.S3FileSystem(key="someone", secret=SECRET, endpoint_url=s3_endpoint)
    fs.mkdir(bucket)
    catalog = {**catalog_in(tmp_path / "lake"), **storage, "warehouse": f"s3://{bucket}"}
    given = {"catalog": catalog, "out": f"s3://{bucket}/to/out"}
    write_source(tmp_path / "src", rows(range(20)))
    for where in (None, "id < 7"):
        materialize(published(tmp_path, where=where, **given), local)
    table = opened(catalog).load_table("db.out")
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(7))
    assert not [path for path in fs.find(bucket) if "_vane_staging" in path]

    again = vd.Pipeline("again", source=vd.iceberg(catalog, "db.out"), id="id")
    again.project("kept", ["text"])
    materialize(again, local)
    assert vd.load(again["kept"], store=str(tmp_path / "store")).num_rows == 7
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


def test_a_catalog_that_is_not_there(tmp_path, local, materialize):
    write_source(tmp_path / "src", rows(range(3)))
    catalog = {"type": "sql", "uri": f"sqlite:////nowhere/{SECRET}.db", "token": SECRET}
    text = failure(materialize(published(tmp_path, catalog=catalog), local, raises=False))
    assert "Iceberg table 'default.db.out' cannot be read" in text
    assert SECRET not in text
