"""Pipelines that read Delta, Iceberg and Lance tables."""

from __future__ import annotations

import datetime
import decimal
import json
import time
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.types import StringType

import vane_dagster as vd
from support import delta_tables, iceberg_tables
from support.data import SECRET, read_stage
from support.results import failure, metadata
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.lance_table import driver_options
from vane_dagster.storage.store import Store
from vane_dagster.storage.table_options import table_options


def rows(ids: Any, **more: Any) -> pa.Table:
    ids = list(ids)
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


class Delta:
    version = "version"
    no_such_version = "Check the version"

    def __init__(self, root: Path) -> None:
        self.url = f"{root}/lake table"
        self.name = self.url

    def source(self, **given: Any) -> Any:
        return vd.delta(self.url, **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        write_deltalake(self.url, table, mode="append", **given)

    def files(self) -> list[str]:
        """The data files, the oldest first."""
        actions = delta_tables.log_actions(Path(self.url), "add")
        return [f"file://{self.url}/{action['path']}" for action in actions]

    def delete(self, positions: Any) -> None:
        """Delete rows of the first file."""
        path = self.files()[0].rpartition("/")[2]
        delta_tables.delete_positions(Path(self.url), path, positions)

    def now(self) -> Any:
        return DeltaTable(self.url).version()


class Lance(Delta):
    no_such_version = "does not exist, or not in the version that is named"

    def source(self, **given: Any) -> Any:
        return vd.lance(self.url, **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        lance.write_dataset(table, self.url, mode="append", **given)

    def files(self) -> list[str]:
        fragments = lance.dataset(self.url).get_fragments()
        return [f"{self.url}/data/{each.metadata.files[0].path}" for each in fragments]

    def delete(self, positions: Any) -> None:
        lance.dataset(self.url).delete(f"id in ({', '.join(map(str, positions))})")

    def now(self) -> Any:
        return lance.dataset(self.url).version


class Iceberg(Delta):
    version = "snapshot"
    no_such_version = "has no snapshot 17; it has 'main', 'release'"

    def __init__(self, root: Path) -> None:
        self.catalog = iceberg_tables.catalog_in(root / "lake")
        self.opened = iceberg_tables.opened(self.catalog)
        self.name = "test.db.docs"

    @property
    def table(self) -> Any:
        return self.opened.load_table("db.docs")

    def source(self, **given: Any) -> Any:
        return vd.iceberg(self.catalog, "db.docs", **given)

    def append(self, table: pa.Table, **given: Any) -> None:
        self.opened.create_table_if_not_exists("db.docs", table.schema).append(table)

    def files(self) -> list[str]:
        files = [task.file for task in self.table.scan().plan_files()]
        return [file.file_path for file in sorted(files, key=lambda f: f.lower_bounds[1])]

    def delete(self, positions: Any) -> None:
        iceberg_tables.delete_positions(self.table, self.files()[0], positions)

    def now(self) -> Any:
        return self.table.current_snapshot().snapshot_id


FORMATS = {"delta": Delta, "iceberg": Iceberg, "lance": Lance}


@pytest.fixture(params=FORMATS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A table of each format in turn, which does not exist yet."""
    return FORMATS[request.param](tmp_path)


def types(batch: pa.Table) -> dict[str, Any]:
    return {"types": [str(batch["n"].type)] * len(batch)}


def docs(source: Any, kept: Any = ("n", "text"), keys: Any = None) -> vd.Pipeline:
    partitions = dg.StaticPartitionsDefinition(keys) if keys else None
    docs = vd.Pipeline("docs", source=source, id="id", fragment_rows=10, partitions_def=partitions)
    docs.project("clean", kept)
    if "n" in kept:
        docs.map_batches("typed", types, schema={"types": "VARCHAR"})
    return docs


def read(root: Path, partition: str | None = None) -> pa.Table:
    return read_stage(root / "store", "docs", "clean", partition).sort_by("id")


def ids(root: Path, partition: str | None = None) -> list[int]:
    return read(root, partition)["id"].to_pylist()


def computed(result: Any) -> int:
    found: int = metadata(result, "clean")["fragments_computed"]
    return found


def details(root: Path) -> list[dict[str, Any]]:
    manifest = Store(Location(str(root / "store"))).in_force("docs", "clean", None)
    assert manifest is not None
    return [json.loads(span.detail) for f in manifest.fragments for span in f.spans]


# All formats


def test_commits_compute_the_files_that_they_change(tmp_path, lake, compute, materialize):
    store, clean = str(tmp_path / "store"), docs(lake.source())["clean"]
    lake.append(rows(range(25)))
    assert computed(materialize(docs(lake.source()), compute)) == 3
    assert computed(materialize(docs(lake.source()), compute)) == 0
    lake.append(rows(range(100, 125)))
    assert computed(materialize(docs(lake.source()), compute)) == 3
    assert ids(tmp_path) == [*range(25), *range(100, 125)]
    if isinstance(lake, Iceberg):
        assert {each["snapshot"] for each in details(tmp_path)} == {lake.now()}
    step = vd.trace(clean, 103, store=store).steps[0]
    assert (step.url, step.row) == (lake.files()[1], 3)
    assert vd.trace("docs/clean", 103, store=store).steps[0].row == step.row
    assert vd.load(clean, store=store).num_rows == 50

    lake.delete([0, 3, 24])
    assert computed(materialize(docs(lake.source()), compute)) == 3
    left = [i for i in range(25) if i not in (0, 3, 24)]
    assert ids(tmp_path) == [*left, *range(100, 125)]
    typed = read_stage(tmp_path / "store", "docs", "typed")["id"].to_pylist()
    assert sorted(typed) == ids(tmp_path)
    step = vd.trace(clean, 20, store=store).steps[0]
    assert (step.url, step.row) == (lake.files()[0], left.index(20))
    assert vd.trace(clean, 120, store=store).steps[0].row == 20


def test_a_version_is_read_as_it_was(tmp_path, lake, local, materialize):
    text = failure(materialize(docs(lake.source()), local, raises=False))
    assert f"table {lake.name!r} does not exist, or not in the version that is named" in text
    lake.append(rows([]))
    assert "has no rows" in failure(materialize(docs(lake.source()), local, raises=False))
    assert materialize(docs(lake.source(allow_empty=True)), local).success
    lake.append(rows(range(5)))
    named = [lake.now()]
    if isinstance(lake, Iceberg):
        lake.table.manage_snapshots().create_tag(lake.now(), "release").commit()
        named.append("release")
    elif isinstance(lake, Lance):
        lance.dataset(lake.url).tags.create("release", lake.now())
        named.append("release")
    else:
        time.sleep(0.05)
        then = datetime.datetime.now(datetime.timezone.utc)
        named += [then, then.isoformat()]
        time.sleep(0.05)
    lake.append(rows(range(5, 10)))
    for version in named:
        result = materialize(docs(lake.source(**{lake.version: version})), local)
        assert ids(tmp_path) == list(range(5))
    assert computed(result) == 0, "the same version by another name"
    materialize(docs(lake.source()), local)
    assert ids(tmp_path) == list(range(10))
    text = failure(materialize(docs(lake.source(**{lake.version: 17})), local, raises=False))
    assert lake.no_such_version in text
    if isinstance(lake, Lance):
        lance.dataset(lake.url).tags.update("release", lake.now())
        materialize(docs(lake.source(version="release")), local)
        assert ids(tmp_path) == list(range(10))


def test_partitions_by_filter(tmp_path, lake, local, materialize):
    lake.append(rows(range(20), day=["it's"] * 10 + ["b"] * 10))
    lake.append(rows(range(100, 105), day=["it's"] * 5))
    keys, by_day = ["it's", "b", "none"], "day = '{partition_key}'"

    def filtered(text: str = by_day, **given: Any) -> vd.Pipeline:
        return docs(lake.source(filter=text, **given), ("n", "day"), keys)

    for key, expected in zip(keys, ([*range(10), *range(100, 105)], list(range(10, 20)))):
        materialize(filtered(), local, partition=key)
        assert ids(tmp_path, key) == expected
    text = failure(materialize(filtered(), local, partition="none", raises=False))
    assert "no rows" in text
    materialize(filtered(allow_empty=True), local, partition="none")
    assert ids(tmp_path, "none") == []

    # A commit to another partition of the table leaves this one as it is.
    lake.append(rows(range(200, 205), day=["b"] * 5))
    assert computed(materialize(filtered(), local, partition="it's")) == 0
    assert computed(materialize(filtered(), local, partition="b")) == 1

    narrowed = f"{by_day} AND (n < 30 OR n > 1020) AND text <> 'text 1'"
    materialize(filtered(narrowed), local, partition="it's")
    assert ids(tmp_path, "it's") == [0, 2, 103, 104]
    store = str(tmp_path / "store")
    assert vd.trace(filtered(narrowed)["clean"], 104, "it's", store=store).steps[0].row == 1
    materialize(filtered("id < 5 OR day = '{partition_key}'"), local, partition="b")
    assert ids(tmp_path, "b") == [*range(5), *range(10, 20), *range(200, 205)]
    wrong = filtered("dya = '{partition_key}'")
    text = failure(materialize(wrong, local, partition="b", raises=False))
    assert "filter of" in text or "where dya = 'b'" in text
    assert "Did you mean 'day'?" in text or "Check the filter" in text


def test_rows_of_all_types(tmp_path, lake, local, materialize):
    columns = {
        "id": pa.array([1, 2], pa.int64()),
        "n": pa.array([1, None], pa.int32()),
        "at": pa.array([datetime.datetime(2026, 1, 1)] * 2, pa.timestamp("us", "UTC")),
        "day": pa.array([datetime.date(2026, 1, 1), None]),
        "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
        "raw": pa.array([b"abc", None]),
        "tags": pa.array([["a", "b"], []]),
        "deep": pa.array([[{"a": 1, "b": "x"}], None]),
    }
    if isinstance(lake, Lance):
        columns["vector"] = pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2))
        columns["kind"] = pa.array(["a", "b"]).dictionary_encode()
    else:
        columns["more"] = pa.array([[("k", 1.5)], None], pa.map_(pa.string(), pa.float64()))
    table = pa.table(columns)
    if isinstance(lake, Iceberg):  # pyiceberg 0.12 writes empty lists for null ones of structs
        pq.write_table(table, tmp_path / "file.parquet")
        created = lake.opened.create_table("db.docs", table.schema)
        created.add_files([f"file://{tmp_path}/file.parquet"])
    else:
        lake.append(table)
    materialize(docs(lake.source(), table.column_names), local)
    assert read(tmp_path).to_pylist() == table.to_pylist()
    if isinstance(lake, Lance):
        assert read(tmp_path).schema.field("vector").type == pa.list_(pa.float32(), 2)


def test_only_the_columns_that_are_read_count(tmp_path, lake, local, materialize):
    lake.append(rows(range(5)))
    few = docs(lake.source(columns=["id", "n"]), ["n"])
    materialize(few, local)
    if isinstance(lake, Iceberg):
        with lake.table.update_schema() as update:
            update.add_column("extra", StringType())
    elif isinstance(lake, Lance):
        lance.dataset(lake.url).add_columns({"extra": "'e'"})
    else:
        lake.append(rows([100], extra=["e"]), schema_mode="merge")
    assert computed(materialize(few, local)) == len(lake.files()) - 1
    result = materialize(docs(lake.source(), ("n", "extra")), local)
    assert computed(result) == len(lake.files())


def test_a_run_reads_the_version_that_it_planned(tmp_path, lake, local, materialize, monkeypatch):
    """A commit between planning and reading changes nothing."""
    lake.append(rows(range(25)))
    kind = type(lake.source())
    for_workers = kind.for_workers

    def raced(source: Any) -> Any:
        monkeypatch.undo()
        lake.append(rows(range(100, 105)))
        lake.delete([0, 1, 2])
        return for_workers(source)

    monkeypatch.setattr(kind, "for_workers", raced)
    materialize(docs(lake.source()), local)
    assert ids(tmp_path) == list(range(25))


@pytest.mark.parametrize("format", ["delta", "lance"])
def test_a_table_on_s3(tmp_path, local, materialize, s3, format):
    """Iceberg tables on S3 are read in test_publish.py."""
    lake, url = FORMATS[format](tmp_path), f"s3://lake/{uuid.uuid4().hex}/a table"
    lake.url, driver = url, table_options if format == "delta" else driver_options
    options = {"storage_options": driver(Location(url, s3))}
    by_day = {"partition_by": ["day"]} if format == "delta" else {}
    lake.append(rows(range(25), day=["it's/x"] * 10 + ["b"] * 15), **options, **by_day)

    def pipeline() -> vd.Pipeline:
        text = "day = '{partition_key}' AND n <> 110"
        source = lake.source(filter=text, storage_options=s3)
        return docs(source, ("n", "day"), ["it's/x", "b"])

    materialize(pipeline(), local, partition="b")
    assert ids(tmp_path, "b") == [10, *range(12, 25)]
    lake.append(rows(range(30, 33), day=["b"] * 3), **options)
    assert computed(materialize(pipeline(), local, partition="b")) == 1
    materialize(pipeline(), local, partition="it's/x")
    assert ids(tmp_path, "it's/x") == list(range(10))
    step = vd.trace(pipeline()["clean"], 24, "b", store=str(tmp_path / "store")).steps[0]
    assert step.url.startswith(f"{url}/{'day=b' if format == 'delta' else 'data'}/")
    assert step.row == 13
    assert len(pipeline().source.list_files(["b"], "here")["b"]) == 2
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


# One format


def test_delta_partition_columns_are_columns_of_their_types(tmp_path, local, materialize):
    lake, moment = Delta(tmp_path), datetime.datetime(2024, 5, 6, 7, 8, 9, 123456)
    named = {
        "day": pa.array([datetime.date(2024, 1, 1), None]),
        "word": pa.array(["it's/x y%", ""]),
        "flag": pa.array([True, None]),
        "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(5, 2)),
        "real": pa.array([0.1, None], pa.float64()),
        "moment": pa.array([moment, None], pa.timestamp("us")),
        "zoned": pa.array([moment, None], pa.timestamp("us", "UTC")),
        "size": pa.array([7, None], pa.int16()),
    }
    lake.append(rows([1, 2], **named), partition_by=list(named))
    expected = {name: values.to_pylist() for name, values in named.items()}
    expected["word"] = ["it's/x y%", None]  # Delta's partitions have no empty texts
    pipeline = docs(lake.source(), [*named, "n"])
    where = "(size = 7 AND moment < zoned + INTERVAL 1 HOUR) OR day IS NULL"
    shown = {f"{name}_": f"{name}::VARCHAR" for name in named}
    pipeline.project("shown", {**shown, "day": "day"}, where=where)
    materialize(pipeline, local)
    found = read(tmp_path).select(list(named))
    assert found.schema.types == [values.type for values in named.values()]
    assert found.to_pydict() == expected
    found = read_stage(tmp_path / "store", "docs", "shown").sort_by("id")
    assert found["day"].to_pylist() == expected["day"]
    assert found["zoned_"].to_pylist() == ["2024-05-06 07:08:09.123456+00", None]
    assert found["price_"].to_pylist() == ["1.50", None]
    step = vd.trace(pipeline["clean"], 1, store=str(tmp_path / "store")).steps[0]
    assert Path(step.url.removeprefix("file://")).is_file()


def test_delta_columns_that_are_added_and_widened(tmp_path, local, materialize):
    lake = Delta(tmp_path)
    lake.append(rows(range(5)))
    lake.append(rows(range(100, 105), extra=["e"] * 5), schema_mode="merge")
    # As Spark does: the type is changed in the schema, and old files keep theirs.
    text = delta_tables.log_actions(Path(lake.url), "metaData")[-1]
    text = {**text, "schemaString": text["schemaString"].replace('"integer"', '"long"')}
    features = {"readerFeatures": ["typeWidening"], "writerFeatures": ["typeWidening"]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    delta_tables.commit(Path(lake.url), [{"protocol": protocol}, {"metaData": text}])
    pipeline = docs(lake.source(), ("n", "extra"))
    pipeline.project("few", {"big": "n + 4000000000"}, where="n >= 20 AND extra IS NULL")
    materialize(pipeline, local)
    assert read(tmp_path)["extra"].to_pylist() == [None] * 5 + ["e"] * 5
    assert read(tmp_path).schema.field("n").type == pa.int64()
    found = read_stage(tmp_path / "store", "docs", "typed")
    assert set(found["types"].to_pylist()) == {"int64"}
    found = read_stage(tmp_path / "store", "docs", "few")
    assert found["big"].to_pylist() == [4_000_000_020, 4_000_000_030, 4_000_000_040]


def test_a_filter_over_deleted_rows_of_a_delta_table(tmp_path, local, materialize):
    lake = Delta(tmp_path)
    lake.append(rows(range(25)))
    lake.delete([2, 4, 11, 20])
    pipeline = docs(lake.source(filter="n % 20 = 0"))
    pipeline.project("few", {"twice": "n * 2"}, where="id > 10")
    materialize(pipeline, local)
    assert ids(tmp_path) == [0, 6, 8, 10, 12, 14, 16, 18, 22, 24]
    found = read_stage(tmp_path / "store", "docs", "few")
    assert found["id"].to_pylist() == [12, 14, 16, 18, 22, 24]


@pytest.mark.parametrize("storage_version", ["2.1", "2.2"])
def test_blobs_of_lance_are_bytes(tmp_path, local, materialize, storage_version):
    blob = pa.field("raw", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([("id", pa.int64()), blob])
    large = [bytes([i]) * (5 << 20) for i in range(30)]
    table = pa.table({"id": list(range(31)), "raw": [*large, None]}, schema=schema)
    Lance(tmp_path).append(table, data_storage_version=storage_version)
    pipeline = vd.Pipeline("docs", source=Lance(tmp_path).source(), id="id")
    pipeline.project("clean", {"size": "octet_length(raw)"})
    assert computed(materialize(pipeline, local)) == 3, "of at most 64 MiB each"
    assert read(tmp_path)["size"].to_pylist() == [5 << 20] * 30 + [None]
