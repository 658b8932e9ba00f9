"""Iceberg sources as they are declared, and what their spans say."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog, SqlCatalogBaseTable
from pyiceberg.io import FileIO, InputFile
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.types import LongType, StringType

import vane_dagster as vd
from support.data import SECRET
from support.iceberg_tables import catalog_in, delete_positions, opened
from support.ingested import bound, rows, split
from vane_dagster.sources import FragmentRule
from vane_dagster.storage.iceberg_catalog import IcebergCatalog


def made(ids: Any, **more: Any) -> pa.Table:
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


@pytest.fixture
def catalog(tmp_path: Path) -> dict[str, str]:
    return catalog_in(tmp_path / "lake")


def created(catalog: dict[str, str], table: pa.Table) -> Any:
    found = opened(catalog).create_table("db.docs", table.schema)
    found.append(table)
    return found


def added(catalog: dict[str, str], table: pa.Table, row_group_size: int) -> tuple[Any, str]:
    file = catalog["warehouse"].removeprefix("file://") + ".parquet"
    pq.write_table(table, file, row_group_size=row_group_size)
    found = opened(catalog).create_table("db.docs", table.schema)
    found.add_files([f"file://{file}"])
    return found, f"file://{file}"


def read(catalog: dict[str, str], size: int = 10, **given: Any) -> list[dict[str, Any]]:
    found = rows(vd.iceberg(catalog, "db.docs", **given), FragmentRule(size))
    return sorted(found, key=lambda row: row["id"])


def test_a_sql_catalog_whose_tables_others_create_at_the_same_time_is_opened(tmp_path):
    catalog = IcebergCatalog("new", {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"})
    real, created = SqlCatalog.create_tables, iter(SqlCatalogBaseTable.metadata.sorted_tables)

    def overtaken(self: SqlCatalog) -> None:
        if (table := next(created, None)) is not None:
            table.create(self.engine)
            table.create(self.engine)
        real(self)

    with mock.patch.object(SqlCatalog, "create_tables", overtaken):
        assert catalog.open().list_namespaces() == []
    with pytest.raises(ValueError, match="Invalid schema_version"):
        replace(catalog, properties={**catalog.properties, "schema_version": "v9"}).open()


@pytest.mark.parametrize(
    ("catalog", "given", "words"),
    [
        (7, {}, "catalog is a int; expected the name of a catalog"),
        ("prod", {"table": "events"}, "table is 'events'; expected the namespace and name"),
        ("prod", {"table": "db.{partition_key}"}, "table is 'db.{partition_key}'; expected"),
    ],
)
def test_what_is_refused_where_it_is_declared(catalog, given, words):
    with pytest.raises(vd.errors.DefinitionError, match=r"vd\.iceberg: ") as raised:
        vd.iceberg(catalog, **{"table": "db.events", **given})
    assert words in str(raised.value)


def test_a_catalog_in_every_form():
    named = vd.iceberg("prod", "db.events", filter="day = '{partition_key}' and n > 3")
    assert named.place == "prod.db.events"
    assert named.url_for("it's") == "prod.db.events where day = 'it''s' and n > 3"
    properties = {"type": "sql", "uri": "sqlite:///c.db", "token": SECRET}
    assert vd.iceberg(properties, "db.events").place == "default.db.events"
    given = vd.iceberg({**properties, "name": "test"}, "db.events")
    opened = SimpleNamespace(name="test", properties=properties)
    assert vd.iceberg(opened, "db.events") == given
    assert given.place == "test.db.events"
    assert SECRET not in repr(given)
    assert pickle.loads(pickle.dumps(given.for_workers())).catalog == given.catalog


def test_equality_deletes_are_refused(catalog):
    table = created(catalog, made(range(5)))
    path = next(iter(table.scan().plan_files())).file.file_path
    delete_positions(table, path, [3], "equality")
    error = str(vd.iceberg(catalog, "db.docs").list_files([None], "here")[None])
    assert "'test.db.docs' cannot be read: " in error
    assert "or compact the table" in error


def test_a_process_that_has_loaded_a_table_loads_it_again_if_it_was_changed(catalog):
    table = created(catalog, pa.table({"id": [1], "text": ["a"]}))
    assert read(catalog) == [{"id": 1, "text": "a"}]
    with table.update_schema() as update:
        update.add_column("more", StringType())
    table.append(pa.table({"id": [2], "text": ["b"], "more": ["c"]}))
    assert [row["more"] for row in read(catalog)] == [None, "c"]
    opened(catalog).drop_table("db.docs")
    created(catalog, pa.table({"id": [1], "more": ["x"], "text": ["y"]}))  # ids of other columns
    assert read(catalog) == [{"id": 1, "more": "x", "text": "y"}]


def test_columns_are_read_by_field_id(catalog):
    table = created(catalog, made(range(5)))
    pinned = table.current_snapshot().snapshot_id
    with table.update_schema() as update:
        update.rename_column("text", "body")
    with table.update_schema() as update:
        update.add_column("text", StringType())
        update.update_column("n", LongType())
        update.move_first("body")
    new = {"body": ["new"], "id": [9], "n": [1 << 40], "text": ["x"]}
    table.append(pa.table(new))
    found = read(catalog)
    assert [row["n"] for row in found] == [0, 10, 20, 30, 40, 1 << 40]
    assert [row["text"] for row in found] == [None] * 5 + ["x"]
    assert [row["body"] for row in found] == [f"text {i}" for i in range(5)] + ["new"]
    assert read(catalog, snapshot=pinned) == made(range(5)).to_pylist()
    assert vd.iceberg(catalog, "db.docs", snapshot=pinned).schema("here").field("n").type == "int32"
    with pytest.raises(vd.errors.SourceError, match="has no column 'm'; it has 'body', 'id'"):
        vd.iceberg(catalog, "db.docs", columns=["m"]).schema("here")


def test_a_filter_over_deleted_rows_of_several_row_groups(catalog):
    nested = pa.array([{"kept": i % 3 > 0, "x": i} if i % 7 else None for i in range(30)])
    given = made(range(30), nested=nested)
    table, url = added(catalog, given, 4)
    delete_positions(table, url, [0, 5, 6, 19, 29])
    where = "nested.kept = true and (n < 100 or n > 150) and text != 'text 8'"
    expected = [
        i for i in range(30)
        if i not in (0, 5, 6, 19, 29) and i % 7 and i % 3 and (i < 10 or i > 15) and i != 8
    ]  # fmt: skip
    for size in (5, 100):
        assert read(catalog, size, filter=where) == given.take(expected).to_pylist()
    source = vd.iceberg(catalog, "db.docs", filter=where)
    found = split(source)
    last = replace(found.fragments[-1], start=found.fragments[-1].stop - 1)
    part = source.for_workers().read(last, found.schema, "here")
    assert part["id"].to_pylist() == expected[-1:]


def test_manifests_and_delete_files_are_read_once_for_all_partitions(catalog):
    table = created(catalog, made(range(20)))
    (task,) = table.scan().plan_files()
    delete_positions(table, task.file.file_path, [3, 5])
    files: list[str] = []

    def opening(self: FileIO, location: str) -> InputFile:
        files.append(location)
        return new_input(self, location)

    new_input = PyArrowFileIO.new_input
    source = vd.iceberg(catalog, "db.docs", filter="id >= {partition_key}")
    keys = [str(n) for n in range(10)]
    with mock.patch.object(PyArrowFileIO, "new_input", opening):
        planned = bound(source)
        listed = planned.list_files(keys, "here")
    assert all(len(files) == 1 for files in listed.values())
    assert sorted(files) == sorted({*files})
    assert len(files) == 5  # the table, the list of manifests, two manifests, and the deletes
    found = planned.split(listed["2"], FragmentRule(10), "here", "2")
    assert sum(each.rows for each in found.fragments) == 16


@pytest.mark.parametrize("where", ["text != 'b'", "not (text = 'b')", "text not like 'b%'"])
def test_null_partition_values_are_filtered_as_null_values(where, catalog):
    """The library plans a file with a null partition value as if each row passed."""
    table = created(catalog, pa.table({"id": [1, 2], "text": ["a", None]}))
    with table.update_spec() as changed:
        changed.add_identity("text")
    table = opened(catalog).load_table("db.docs")
    table.append(pa.table({"id": [3, 4, 5], "text": ["a", None, "b"]}))
    assert [row["id"] for row in read(catalog, filter=where)] == [1, 3]
