"""The contract of publishers, over each format of the package."""

from __future__ import annotations

import datetime
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from lance.commit import CommitConflictError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.types import StringType

import vane_dagster as vd
from support.data import SECRET
from support.iceberg_tables import catalog_in, opened
from support.manifests import manifest, part
from support.published import docs

# F403: all tests of the contract run here, over each format.
from support.publisher_contract import *  # noqa: F403  # the contract's tests
from support.publisher_contract import Published
from vane_dagster import retries
from vane_dagster.errors import SchemaError, StoreError
from vane_dagster.storage import table_options
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Manifest, ManifestName
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.publish.base import publish
from vane_dagster.storage.publish.lance import _COMMIT_LOCK
from vane_dagster.storage.store import Store

KEYS = ["p", "q"]


def named(param: tuple[str, int | None]) -> str:
    format, target = param
    return f"{format} merged" if target else format


def row(number: int, **columns: str) -> pa.Table:
    return pa.table({"id": [number], **{name: [value] for name, value in columns.items()}})


# Parts are merged before any format sees them, so that files show it.
FORMATS = "parquet", "delta", "iceberg", "lance"
TARGETS = [*((format, None) for format in FORMATS), ("parquet", 3000)]


@pytest.fixture(params=TARGETS, ids=named)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    """An empty target of each format in turn, with files as they are and merged ones."""
    format, target = request.param
    out, given = str(tmp_path / "out"), {"format": format, "target_file_bytes": target}
    if format == "iceberg":
        given |= {"catalog": catalog_in(tmp_path / "catalog"), "table": "db.t"}
    if format != "parquet":
        given["partition_column"] = "key"
    spec = docs(tmp_path, columns=["id"], keys=KEYS, **given)["out"].spec

    def iceberg() -> Any:
        return opened(given["catalog"]).load_table("db.t")

    def table(version: Any) -> pa.Table:
        if format == "parquet":
            files = Path(out).rglob("*.parquet")
            return pa.concat_tables(pq.ParquetFile(file).read() for file in files)
        if format == "delta":
            return DeltaTable(out, version).to_pyarrow_table()
        if format == "lance":
            return lance.dataset(out, version).to_table()
        return iceberg().scan(snapshot_id=version).to_arrow()

    def add(number: int) -> None:
        if format == "parquet":
            key = uuid.uuid4().hex + "f" * 8  # as another pipeline
            part(StoragePath(f"{out}/p"), [number], key=key, compression="zstd")
        elif format == "delta":
            write_deltalake(out, row(number, key="other"), mode="append")
        elif format == "lance":
            lance.write_dataset(row(number, key="other"), out, mode="append")
        else:
            iceberg().append(row(number, key="other"))

    def remove(number: int) -> None:
        tables = {"delta": DeltaTable, "lance": lance.dataset, "iceberg": lambda _: iceberg()}
        if format in tables:
            tables[format](out).delete(f"id = {number}")

    def versions() -> list[Any]:
        if format == "delta":
            return [commit["version"] for commit in DeltaTable(out).history()][::-1]
        if format == "lance":
            return [each["version"] for each in lance.dataset(out).versions()]
        if format == "iceberg":
            return [snapshot.snapshot_id for snapshot in iceberg().snapshots()]
        return []

    def compact() -> None:
        if format == "delta":
            DeltaTable(out).optimize.compact()
            given = {"dry_run": False, "enforce_retention_duration": False}
            DeltaTable(out).vacuum(0, **given)
        elif format == "lance":
            lance.dataset(out).optimize.compact_files()
            lance.dataset(out).cleanup_old_versions(timedelta(0), delete_unverified=True)
        elif format == "iceberg":  # as rewrite_data_files of Spark
            iceberg().overwrite(iceberg().scan().to_arrow())

    def drop() -> None:
        if format == "iceberg":
            opened(given["catalog"]).drop_table("db.t")
        shutil.rmtree(out)

    store = Store(StoragePath(str(tmp_path / "store")))
    return Published(store, spec.publisher, table, add, remove, versions, compact, drop)


TABLES = [("delta", None), ("iceberg", None), ("lance", None)]


@pytest.mark.parametrize("published", TABLES, indirect=True)
def test_a_table_with_other_columns_or_partitions_is_refused(published):
    published.publish("p", {"a": [1]})
    publisher = published.publisher("p")
    for schema, words in (
        (pa.schema([("id", pa.string())]), "column 'id' is string here, but "),
        (pa.schema([("id", pa.int64()), ("n", pa.int64())]), "here, but no column in the "),
        (pa.schema([]), "column 'id' is no column here, but "),
    ):
        with pytest.raises(SchemaError, match=words):
            publisher.check(schema, "here")
    made = published.manifest("p", {"b": [2]}, "2")  # the table was changed after the check
    error = published.commit("p", replace(made, schema=pa.schema([("id", pa.string())])))
    assert "column 'id' is string here" in str(error)
    assert publisher.staging.names(), "which the next run takes"
    assert published.ids == [1]
    whole = type(publisher)(replace(publisher._declared, partition_column=None), None)
    with pytest.raises(SchemaError, match=r"is partitioned by .*expected \[\]|column 'key' is no"):
        whole.check(made.schema, "here")


@pytest.mark.parametrize("published", [("delta", None)], indirect=True)
def test_a_delta_table_is_changed_as_its_refusal_says(published):
    published.publish("p", {"a": [1]})
    publisher, wider = published.publisher("p"), pa.schema([("id", pa.string())])
    with pytest.raises(SchemaError, match=r"\(write_deltalake with schema_mode='overwrite'"):
        publisher.check(wider, "here")
    table = pa.table({"id": ["1"], "key": ["p"]})
    given = {"mode": "overwrite", "schema_mode": "overwrite", "partition_by": ["key"]}
    write_deltalake(publisher.target.url, table, **given)
    publisher.check(wider, "here")
    DeltaTable(publisher.target.url).alter.add_columns(Field("n", PrimitiveType("long")))
    publisher.check(wider.append(pa.field("n", pa.int64())), "here")


@pytest.mark.parametrize("published", [("parquet", None)], indirect=True)
def test_files_that_another_run_has_announced_meanwhile_stay(published, monkeypatch):
    """Its run began before, and publishes between this one's publication and its commit."""
    made, real = published.manifest("p", {"a": [1]}, "1"), published.store.commit
    other = published.manifest("p", {"b": [2]}, "2")
    with monkeypatch.context() as patch:

        def overtaken(manifest: Manifest, *names: Any) -> ManifestName:
            patch.undo()
            names = published.store.manifest_names("docs", "s", "p")
            publish(published.store, published.publisher("p"), other, 0.0, names, nullcontext())
            return real(manifest)

        patch.setattr(published.store, "commit", overtaken)
        assert isinstance(published.commit("p", made), ManifestName)
    assert published.ids == [1]
    assert published.clean("p")


MOMENT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
WIDENED = {
    "small": pa.array([255, None], pa.uint8()),
    "vector": pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2)),
    "at": pa.array([MOMENT, None], pa.timestamp("ms", "Europe/Berlin")),
    "raw": pa.array([b"abc", None], pa.binary(3)),
    "rows": pa.array([[{"a": 1}], []], pa.list_(pa.struct([("a", pa.uint16())]))),
    "price": pa.array([None, None], pa.decimal128(10, 2)),
    "day": pa.array([datetime.date(2026, 1, 1), None]),
    "of": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
    "tensor": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.float32(), 4)),
}


@pytest.mark.parametrize("published", TABLES, indirect=True)
def test_types_that_a_format_does_not_have_are_widened(published):
    publisher, rows = published.publisher("p"), pa.table({"id": [1, 2], **WIDENED})
    kind = vd.tensor("float32", (2, 2))
    given = rows.schema.set(rows.schema.get_field_index("tensor"), pa.field("tensor", kind))
    schema = publisher.stored(given, "here")
    target = PartTarget(publisher.staging, "a" * 40, "id", compression="zstd")
    info = write_part(rows.cast(schema), target)
    made = replace(manifest([info], "p"), schema=schema, kind="write", keys=("id",))
    assert isinstance(published.commit("p", made), ManifestName)
    publisher.check(schema, "here")
    found = published.table(None).drop_columns("key")
    assert found.to_pylist() == rows.to_pylist()
    if publisher.format == "lance":
        assert found.schema.field("vector").type == WIDENED["vector"].type


STRANGE = ["a/b", 'it\'s "q" 100%', "..", " ü=&;`*?{}#~\\%2F ", "A", "a"]


@pytest.mark.parametrize("published", [("delta", None), ("lance", None)], indirect=True)
def test_partition_keys_of_any_characters_stand_in_the_table(published, tmp_path):
    before = {path.name for path in tmp_path.iterdir()}
    for number, key in enumerate(STRANGE):
        published.publish(key, {"a": [number]})
    for number, key in enumerate(STRANGE[:2]):
        published.publish(key, {"b": [-number]}, "2")
    found = published.table(None)
    ids = [0, -1, *range(2, 6)]
    assert dict(zip(found["key"].to_pylist(), found["id"].to_pylist())) == dict(zip(STRANGE, ids))
    assert {path.name for path in tmp_path.iterdir()} - before <= {"out", "store"}


@pytest.mark.parametrize("published", [("iceberg", None)], indirect=True)
def test_an_iceberg_table_of_others_with_the_columns_is_taken(published, tmp_path):
    """It has another location, other ids, no name mapping, and files from elsewhere."""
    catalog = opened(catalog_in(tmp_path / "catalog"))
    schema = pa.schema([("key", pa.string()), ("id", pa.int64())])
    table = catalog.create_table("db.t", schema)
    with table.update_spec() as update:
        update.add_identity("key")
    table.append(pa.table({"key": ["other"], "id": [9]}, schema))
    published.publish("p", {"a": [1, 2]})
    table.refresh()
    with table.update_schema() as update:
        update.rename_column("id", "number")
    with table.update_schema() as update:
        update.add_column("more", StringType())
    assert sorted(published.table(None)["number"].to_pylist()) == [1, 2, 9]


@pytest.mark.parametrize("published", TABLES, indirect=True)
def test_a_conflict_that_does_not_end_is_told(published, monkeypatch):
    monkeypatch.setattr(retries, "TRANSACTION_ATTEMPTS", 3)
    monkeypatch.setattr(type(published.publisher("p")), "_replace", lambda *given: None)
    error = published.commit("p", published.manifest("p", {"a": [1]}, "1"))
    assert "changed the same partition 3 times" in str(error)


@pytest.mark.parametrize("published", [("delta", None), ("lance", None)], indirect=True)
def test_maintenance_of_a_table_passes_over_what_is_staged(published, tmp_path):
    """Pins what the folder's name is for. A compaction joins rows of several partitions."""
    for key, ids in (("p", [1, 2]), ("q", [3, 4]), ("p", [1])):
        published.publish(key, {"a": ids[:1], "b": ids[1:]}, str(ids[-1]))
    published.manifest("p", {"c": [5]}, "5")
    (staged,) = published.publisher("p").staging.names()
    if published.publisher("p").format == "delta":
        (tmp_path / "out/alien.parquet").write_bytes(b"not in the table")
        given = {"dry_run": False, "enforce_retention_duration": False, "full": True}
        assert "alien.parquet" in DeltaTable(tmp_path / "out").vacuum(0, **given)
        DeltaTable(tmp_path / "out").optimize.compact()
    else:
        lance.dataset(tmp_path / "out").optimize.compact_files()
        table = lance.dataset(tmp_path / "out")
        assert len(table.get_fragments()) == 1
        stats = table.cleanup_old_versions(timedelta(0), delete_unverified=True)
        assert stats.old_versions > 2
    assert [*published.publisher("p").staging.names()] == [staged]
    assert published.ids == [1, 3, 4]
    published.publish("p", {"c": [5]}, "5")
    assert published.ids == [3, 4, 5]


@pytest.mark.parametrize("published", [("lance", None)], indirect=True)
def test_files_of_unchanged_rows_stay(published):
    published.publish("p", {"a": [1], "b": [2]})
    before = {*published.files("p")}
    published.publish("p", {"a": [1], "b": [2], "c": [3]}, "2")
    assert before < {*published.files("p")}


@pytest.mark.parametrize("format", ["delta", "lance"])
def test_a_table_on_a_server_that_is_not_there(format, tmp_path, monkeypatch):
    real, name = table_options.table_options, format.capitalize()
    hurried = {"max_retries": "0", "retry_timeout": "1s", "connect_timeout": "1s"}
    hurried |= {"client_max_retries": "0", "client_retry_timeout": "1"}
    monkeypatch.setattr(table_options, "table_options", lambda place: {**real(place), **hurried})
    options = {"key": "a", "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}
    given = {"columns": ["id"], "format": format, "storage_options": options}
    publisher = docs(tmp_path, out="s3://lake/t", **given)["out"].spec.publisher(None)
    with pytest.raises(StoreError, match=f"{name} table 's3://lake/t' cannot be read") as raised:
        publisher.check(pa.schema([("id", pa.int64())]), "here")
    assert SECRET not in str(raised.value)


def test_a_catalog_that_is_not_there(tmp_path):
    catalog = {"type": "sql", "uri": f"sqlite:////nowhere/{SECRET}.db", "token": SECRET}
    given = {"columns": ["id"], "format": "iceberg", "catalog": catalog, "table": "db.out"}
    publisher = docs(tmp_path, **given)["out"].spec.publisher(None)
    words = "Iceberg table 'default.db.out' cannot be read"
    with pytest.raises(StoreError, match=words) as raised:
        publisher.check(pa.schema([("id", pa.int64())]), "here")
    assert SECRET not in str(raised.value)


def test_two_stages_create_the_namespace_of_their_tables_at_the_same_time(tmp_path, monkeypatch):
    catalog = {**catalog_in(tmp_path), "name": "other"}
    schema, asked = pa.schema([("id", pa.int64())]), threading.Barrier(2)
    exists, seen = SqlCatalog.namespace_exists, threading.local()

    def slow(self: Any, *given: Any) -> bool:
        found = exists(self, *given)
        if not hasattr(seen, "before"):
            seen.before = asked.wait(timeout=30)
        return found

    monkeypatch.setattr(SqlCatalog, "namespace_exists", slow)

    def create(name: str) -> Any:
        given = {"columns": ["id"], "format": "iceberg", "catalog": catalog, "table": f"new.{name}"}
        made = docs(tmp_path / name, out=str(tmp_path / name / "out"), **given)
        return made["out"].spec.publisher(None)._created(schema)

    with ThreadPoolExecutor() as threads:
        tables = list(threads.map(create, ["a", "b"]))
    assert [table.name() for table in tables] == [("new", "a"), ("new", "b")]


def test_a_fragment_that_no_table_has_makes_commits_of_lance_conflict(tmp_path):
    """Pins what the publisher's lock relies on, also for a table without fragments."""
    lock = [_COMMIT_LOCK]
    table = lance.write_dataset(row(1).slice(1), str(tmp_path / "t"))
    operation = lance.LanceOperation.Update(removed_fragment_ids=lock)
    lance.LanceDataset.commit(table, lance.Transaction(table.version, operation))
    with pytest.raises(CommitConflictError):
        lance.LanceDataset.commit(table, lance.Transaction(table.version, operation))
    table.checkout_latest()
    lance.write_dataset(row(1), str(tmp_path / "t"), mode="append")
    lance.LanceDataset.commit(table, lance.Transaction(table.version, operation))
    assert lance.dataset(str(tmp_path / "t")).count_rows() == 1, "appends of others go on"
