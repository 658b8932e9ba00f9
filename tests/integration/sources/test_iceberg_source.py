"""Pipelines that read Iceberg tables."""

from __future__ import annotations

import datetime
import decimal
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import LongType, StringType

import vane_dagster as vd
from support.data import read_stage
from support.iceberg_tables import catalog_in, delete_positions, opened
from support.results import failure, metadata
from vane_dagster.sources.base import FragmentRule, ReadContext
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store


def rows(ids: Any, **more: Any) -> pa.Table:
    ids = list(ids)
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


@pytest.fixture
def catalog(tmp_path: Path) -> dict[str, str]:
    return catalog_in(tmp_path / "lake")


def docs(catalog: Any, kept: Any = ("n", "text"), keys: Any = None, **given: Any) -> vd.Pipeline:
    docs = vd.Pipeline(
        "docs",
        source=vd.iceberg(catalog, "db.docs", **given),
        id="id",
        fragment_rows=10,
        partitions_def=dg.StaticPartitionsDefinition(keys) if keys else None,
    )
    docs.project("clean", kept)
    return docs


def ids(root: Path, partition: str | None = None) -> list[int]:
    return sorted(read_stage(root / "store", "docs", "clean", partition)["id"].to_pylist())


def details(root: Path) -> list[dict[str, Any]]:
    store = Store(Location(str(root / "store")))
    manifest = store.in_force("docs", "clean", None)
    assert manifest is not None
    return [json.loads(span.detail) for f in manifest.fragments for span in f.spans]


def test_a_commit_that_adds_files_computes_those(tmp_path, catalog, compute, materialize):
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    table.append(rows(range(25)))
    first = materialize(docs(catalog), compute)
    assert metadata(first, "clean")["fragments_computed"] == 3
    assert ids(tmp_path) == list(range(25))
    again = materialize(docs(catalog), compute)
    assert metadata(again, "clean")["fragments_computed"] == 0

    table.append(rows(range(100, 105)))
    more = materialize(docs(catalog), compute)
    assert metadata(more, "clean")["fragments_computed"] == 1
    assert ids(tmp_path) == [*range(25), *range(100, 105)]
    assert {d["snapshot"] for d in details(tmp_path)} == {table.current_snapshot().snapshot_id}

    found = vd.trace("docs/clean", 103, store=str(tmp_path / "store"))
    step = vd.trace(docs(catalog)["clean"], 103, store=str(tmp_path / "store")).steps[0]
    assert step.url in {task.file.file_path for task in table.scan().plan_files()}
    assert step.row == 3
    assert found.steps[0].url == step.url
    loaded = vd.load(docs(catalog)["clean"], store=str(tmp_path / "store"))
    assert loaded.num_rows == 30


def test_deletes_are_applied_and_recompute_their_file(tmp_path, catalog, local, materialize):
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    for start in (0, 100):
        table.append(rows(range(start, start + 25)))
    materialize(docs(catalog), local)
    path = next(
        task.file.file_path
        for task in table.scan().plan_files()
        if task.file.lower_bounds[1] == (0).to_bytes(8, "little")
    )
    delete_positions(table, path, [0, 3, 24])
    result = materialize(docs(catalog), local)
    assert metadata(result, "clean")["fragments_computed"] == 3
    left = [i for i in range(25) if i not in (0, 3, 24)]
    assert ids(tmp_path) == [*left, *range(100, 125)]
    assert sum("live" in d for d in details(tmp_path)) == 3
    step = vd.trace(docs(catalog)["clean"], 20, store=str(tmp_path / "store")).steps[0]
    assert (step.url, step.row) == (path, left.index(20))


def test_equality_deletes_are_refused(tmp_path, catalog, local, materialize):
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    table.append(rows(range(5)))
    path = next(iter(table.scan().plan_files())).file.file_path
    delete_positions(table, path, [3], "equality")
    text = failure(materialize(docs(catalog), local, raises=False))
    assert "'test.db.docs' cannot be read: " in text
    assert "or compact the table" in text


def test_columns_are_read_by_field_id(tmp_path, catalog, local, materialize):
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    table.append(rows(range(5)))
    pinned = table.current_snapshot().snapshot_id
    with table.update_schema() as update:
        update.rename_column("text", "body")
    with table.update_schema() as update:
        update.add_column("text", StringType())
        update.update_column("n", LongType())
        update.move_first("body")
    table.append(
        pa.table(
            {
                "body": ["new"],
                "id": pa.array([9], pa.int64()),
                "n": pa.array([1 << 40], pa.int64()),
                "text": ["x"],
            }
        )
    )
    materialize(docs(catalog, ("n", "text", "body")), local)
    read = read_stage(tmp_path / "store", "docs", "clean").sort_by("id")
    assert read["n"].to_pylist() == [0, 10, 20, 30, 40, 1 << 40]
    assert read["text"].to_pylist() == [None] * 5 + ["x"]
    assert read["body"].to_pylist() == [f"text {i}" for i in range(5)] + ["new"]

    materialize(docs(catalog, snapshot=pinned), local)
    read = read_stage(tmp_path / "store", "docs", "clean").sort_by("id")
    assert read["text"].to_pylist() == [f"text {i}" for i in range(5)]
    assert read.schema.field("n").type == pa.int32()


def test_only_named_columns_count(tmp_path, catalog, local, materialize):
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    table.append(rows(range(5)))
    given = {"columns": ["id", "n"]}
    materialize(docs(catalog, ["n"], **given), local)
    with table.update_schema() as update:
        update.add_column("more", StringType())
    result = materialize(docs(catalog, ["n"], **given), local)
    assert metadata(result, "clean")["fragments_computed"] == 0
    with pytest.raises(
        vd.errors.SourceError, match="has no column 'm'; it has 'id', 'n', 'text', 'more'"
    ):
        vd.iceberg(catalog, "db.docs", columns=["m"]).schema("here")


def test_rows_of_all_types(tmp_path, catalog, local, materialize):
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int64()),
            "at": pa.array([datetime.datetime(2026, 1, 1)] * 2, pa.timestamp("us", "UTC")),
            "day": pa.array([datetime.date(2026, 1, 1), None]),
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "raw": pa.array([b"abc", None]),
            "tags": pa.array([["a", "b"], []]),
            "deep": pa.array([[{"a": 1, "b": "x"}], None]),
            "more": pa.array([[("k", 1.5)], None], pa.map_(pa.string(), pa.float64())),
        }
    )
    file = tmp_path / "file.parquet"  # pyiceberg 0.12 writes empty lists for null ones of structs
    pq.write_table(table, file)
    opened(catalog).create_table("db.docs", table.schema).add_files([f"file://{file}"])
    materialize(docs(catalog, table.column_names), local)
    assert read_stage(tmp_path / "store", "docs", "clean").to_pylist() == table.to_pylist()


def test_partition_values_are_columns_that_files_lack(tmp_path, catalog):
    """As in files of Hive tables that were added to an Iceberg table."""
    day, price = [datetime.date(2026, 1, 1), None], [decimal.Decimal("1.50")] * 2
    columns = {"day": pa.array(day), "price": pa.array(price, pa.decimal128(9, 2))}
    table = opened(catalog).create_table("db.docs", rows([1, 2], **columns).schema)
    with table.update_spec() as spec:
        spec.add_identity("day").add_identity("price")
    table.append(rows([1, 2], **columns))
    for task in table.scan().plan_files():
        file = task.file.file_path.removeprefix("file://")
        pq.write_table(pq.read_table(file).drop_columns(["day", "price"]), file)
    source = vd.iceberg(catalog, "db.docs", filter="price = 1.50")
    found = source.split(source.list_files([None], "here")[None], FragmentRule(10), "here")
    reader = source.for_workers()
    read = [reader.read(each, found.schema, ReadContext("here")) for each in found.fragments]
    assert pa.concat_tables(read).sort_by("id").equals(rows([1, 2], **columns))


STRUCTS = pa.list_(pa.struct([("a", pa.int64())]))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (STRUCTS, [None, [], [None], [{"a": 1}]]),
        (pa.large_list(STRUCTS.value_type), [None, [], [{"a": None}]]),
        (pa.map_(pa.string(), STRUCTS.value_type), [None, [], [("k", None)], [("k", {"a": 1})]]),
        (pa.map_(pa.string(), STRUCTS), [None, [], [("k", None)], [("k", [None])]]),
        (pa.struct([("inner", STRUCTS)]), [None, {"inner": None}, {"inner": []}]),
        (pa.list_(STRUCTS), [None, [], [None], [[]], [[None]], [[{"a": 1}], None]]),
        (pa.list_(pa.list_(pa.int64())), [None, [], [None], [[None]]]),
    ],
)
def test_nulls_in_nested_columns_are_kept(kind, values, tmp_path, catalog):
    """pyiceberg 0.12 reads null lists and maps of structs as empty ones."""
    rows = pa.table({"id": range(len(values)), "former": pa.array(values, kind)})
    table = opened(catalog).create_table("db.docs", rows.schema)
    file = tmp_path / "file.parquet"
    pq.write_table(rows, file, row_group_size=2)
    table.add_files([f"file://{file}"])
    with table.update_schema() as update:
        update.rename_column("former", "deep")
        if kind == STRUCTS:
            update.add_column(("former", "element", "added"), StringType())
            values = [each and [s and {**s, "added": None} for s in each] for each in values]
    source = vd.iceberg(catalog, "db.docs")
    found = source.split(source.list_files([None], "here")[None], FragmentRule(2), "here")
    reader, context = source.for_workers(), ReadContext("here")
    read = [reader.read(fragment, found.schema, context) for fragment in found.fragments]
    assert pa.concat_tables(read)["deep"].to_pylist() == values


def test_a_filter_over_deleted_rows_of_several_row_groups(tmp_path, catalog):
    nested = pa.array([{"kept": i % 3 > 0, "x": i} if i % 7 else None for i in range(30)])
    given = rows(range(30), nested=nested)
    file = tmp_path / "file.parquet"
    pq.write_table(given, file, row_group_size=4)
    table = opened(catalog).create_table("db.docs", given.schema)
    table.add_files([f"file://{file}"])
    delete_positions(table, f"file://{file}", [0, 5, 6, 19, 29])
    where = "nested.kept = true and (n < 100 or n > 150) and text != 'text 8'"
    source = vd.iceberg(catalog, "db.docs", filter=where)
    expected = [
        i for i in range(30)
        if i not in (0, 5, 6, 19, 29) and i % 7 and i % 3 and (i < 10 or i > 15) and i != 8
    ]  # fmt: skip
    for size in (5, 100):
        found = source.split(source.list_files([None], "here")[None], FragmentRule(size), "here")
        reader, context = source.for_workers(), ReadContext("here")
        read = [reader.read(each, found.schema, context) for each in found.fragments]
        assert all(len(each) == f.stop - f.start for each, f in zip(read, found.fragments))
        assert pa.concat_tables(read).equals(given.take(expected))
        part = replace(found.fragments[-1], start=found.fragments[-1].stop - 1)
        assert reader.read(part, found.schema, context)["id"].to_pylist() == expected[-1:]


@pytest.mark.parametrize("where", ["text != 'b'", "not (text = 'b')", "text not like 'b%'"])
def test_null_partition_values_are_filtered_as_null_values(where, tmp_path, catalog):
    """The library plans a file with a null partition value as if each row passed."""
    table = opened(catalog).create_table("db.docs", rows([1], text=["a"]).schema)
    table.append(rows([1, 2], text=["a", None]))
    with table.update_spec() as changed:
        changed.add_identity("text")
    table = opened(catalog).load_table("db.docs")
    table.append(rows([3, 4, 5], text=["a", None, "b"]))
    source = vd.iceberg(catalog, "db.docs", filter=where)
    bound = source.bind(Store(Location(str(tmp_path / "store"))))
    files = bound.required(bound.list_files([None], "here")[None], None, "here")
    split = bound.split(files, FragmentRule(10), "here")
    read = [bound.read(f, split.schema, ReadContext("here")) for f in split.fragments]
    assert sorted(pa.concat_tables(read)["id"].to_pylist()) == [1, 3]


def test_tables_and_snapshots_that_are_missing_or_empty(tmp_path, catalog, local, materialize):
    text = failure(materialize(docs(catalog), local, raises=False))
    assert "Iceberg table 'test.db.docs' does not exist, or not in the version" in text
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    text = failure(materialize(docs(catalog), local, raises=False))
    assert "'test.db.docs' has no rows" in text
    assert materialize(docs(catalog, allow_empty=True), local).success
    table.append(rows(range(3)))
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "release").commit()
    assert materialize(docs(catalog, snapshot="release"), local).success
    text = failure(materialize(docs(catalog, snapshot=17), local, raises=False))
    assert "has no snapshot 17; it has 'main', 'release'" in text


def test_a_file_that_is_gone(tmp_path, catalog):
    table = opened(catalog).create_table("db.docs", rows([]).schema)
    table.append(rows(range(3)))
    source = vd.iceberg(catalog, "db.docs")
    files = source.list_files([None], "here")[None]
    found = source.split(files, FragmentRule(10), "here")
    path = found.fragments[0].url
    Path(path.removeprefix("file://")).unlink()
    words = f"here: '{path}' cannot be read: .*If the file is gone, a cleanup after"
    with pytest.raises(vd.errors.SourceError, match=words):
        source.for_workers().read(found.fragments[0], found.schema, ReadContext("here"))
    with pytest.raises(vd.errors.SourceError, match="If the file is gone, a cleanup after"):
        source.split(files, FragmentRule(10), "here")


def test_workers_that_have_loaded_the_table_before(tmp_path, catalog, compute, materialize):
    """They load it again if its schema has changed, or if it was created anew."""

    def texts() -> list[str]:
        materialize(docs(catalog, ["text"]), compute)
        return read_stage(tmp_path / "store", "docs", "clean")["text"].to_pylist()

    known = opened(catalog)
    table = known.create_table("db.docs", pa.schema([("id", pa.int64()), ("text", pa.string())]))
    table.append(pa.table({"id": [1], "text": ["a"]}))
    assert texts() == ["a"]
    with table.update_schema() as change:
        change.add_column("more", StringType())
    table.append(pa.table({"id": [2], "text": ["b"], "more": ["c"]}))
    assert sorted(texts()) == ["a", "b"]

    known.drop_table("db.docs")
    moved = pa.table({"id": [1], "more": ["x"], "text": ["y"]})  # with the ids of other columns
    known.create_table("db.docs", moved.schema).append(moved)
    assert texts() == ["y"]


def test_a_filter_on_a_name_that_is_given_to_another_column(tmp_path, catalog, local, materialize):
    table = opened(catalog).create_table("db.docs", rows([], high=pa.array([], pa.int64())).schema)
    table.append(rows(range(6), high=pa.array(range(60, 0, -10), pa.int64())))
    filtered = {"columns": ["id", "text"], "filter": "high < 30"}
    materialize(docs(catalog, ["text"], **filtered), local)
    assert ids(tmp_path) == [4, 5]
    with table.update_schema() as change:
        change.rename_column("high", "low").rename_column("n", "high")
    materialize(docs(catalog, ["text"], **filtered), local)
    assert ids(tmp_path) == [0, 1, 2]
