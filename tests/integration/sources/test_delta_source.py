"""Pipelines that read Delta tables."""

from __future__ import annotations

import datetime
import decimal
import json
import time
import uuid
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import write_deltalake

import vane_dagster as vd
from support.data import read_stage
from support.delta_tables import commit, delete_positions, log_actions
from support.results import failure, metadata
from vane_dagster.sources import FragmentRule, ReadContext
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.table_options import table_options


def rows(ids: Any, **more: Any) -> pa.Table:
    ids = list(ids)
    columns = {"id": pa.array(ids, pa.int64()), "n": pa.array([i * 10 for i in ids], pa.int32())}
    return pa.table({**columns, "text": pa.array([f"text {i}" for i in ids], pa.string()), **more})


def types(batch: pa.Table) -> dict[str, Any]:
    return {"types": [str(batch["n"].type)] * len(batch)}


def docs(url: Any, kept: Any = ("n", "text"), keys: Any = None, **given: Any) -> vd.Pipeline:
    docs = vd.Pipeline(
        "docs",
        source=vd.delta(str(url), **given),
        id="id",
        fragment_rows=10,
        partitions_def=dg.StaticPartitionsDefinition(keys) if keys else None,
    )
    docs.project("clean", kept)
    docs.map_batches("typed", types, schema={"types": "VARCHAR"})
    return docs


def ids(root: Path, partition: str | None = None) -> list[int]:
    found = sorted(read_stage(root / "store", "docs", "clean", partition)["id"].to_pylist())
    typed = sorted(read_stage(root / "store", "docs", "typed", partition)["id"].to_pylist())
    assert found == typed
    return found


def test_a_commit_that_adds_files_computes_those(tmp_path, compute, materialize):
    table, store = tmp_path / "lake table", str(tmp_path / "store")
    write_deltalake(table, rows(range(25)))
    first = materialize(docs(table), compute)
    assert metadata(first, "clean")["fragments_computed"] == 3
    assert ids(tmp_path) == list(range(25))
    again = materialize(docs(table), compute)
    assert metadata(again, "clean")["fragments_computed"] == 0

    write_deltalake(table, rows(range(100, 105)), mode="append")
    more = materialize(docs(table), compute)
    assert metadata(more, "clean")["fragments_computed"] == 1
    assert ids(tmp_path) == [*range(25), *range(100, 105)]

    step = vd.trace(docs(table)["clean"], 103, store=store).steps[0]
    assert step.url.removeprefix("file://") in {
        f"{table}/{action['path']}" for action in log_actions(table, "add")
    }
    assert step.row == 3
    assert vd.load(docs(table)["clean"], store=store).num_rows == 30

    (table / step.url.rpartition("/")[2]).rename(tmp_path / "kept")
    text = failure(materialize(docs(table, ["n"]), compute, raises=False))
    assert "If the file is gone, VACUUM has deleted files of former versions" in text


def test_a_version_is_read_as_it_was(tmp_path, local, materialize):
    table = tmp_path / "t"
    write_deltalake(table, rows(range(5)))
    time.sleep(0.05)
    then = datetime.datetime.now(datetime.timezone.utc)
    time.sleep(0.05)
    write_deltalake(table, rows(range(10)), mode="overwrite")
    for version in (0, then, then.isoformat()):
        materialize(docs(table, version=version), local)
        assert ids(tmp_path) == list(range(5))
    result = materialize(docs(table, version=then), local)
    assert metadata(result, "clean")["fragments_computed"] == 0
    materialize(docs(table), local)
    assert ids(tmp_path) == list(range(10))
    text = failure(materialize(docs(table, version=7), local, raises=False))
    assert "cannot be read: DeltaError" in text
    assert "Check the version" in text
    text = failure(materialize(docs(tmp_path / "none"), local, raises=False))
    assert "does not exist, or not in the version that is named. Check both, or write" in text


@pytest.mark.parametrize("inline", [False, True])
def test_deletion_vectors_are_applied_and_recompute_their_file(
    inline, tmp_path, local, materialize
):
    table, store = tmp_path / "lake table", str(tmp_path / "store")
    write_deltalake(table, rows(range(25)))
    write_deltalake(table, rows(range(100, 125)), mode="append")
    materialize(docs(table), local)
    path = log_actions(table, "add")[0]["path"]
    delete_positions(table, path, [0, 3, 24], inline)
    result = materialize(docs(table), local)
    assert metadata(result, "clean")["fragments_computed"] == 3
    left = [i for i in range(25) if i not in (0, 3, 24)]
    assert ids(tmp_path) == [*left, *range(100, 125)]
    clean = docs(table)["clean"]
    step = vd.trace(clean, 20, store=store).steps[0]
    assert (step.url.rpartition("/")[2], step.row) == (path, left.index(20))
    assert vd.trace(clean, 120, store=store).steps[0].row == 20

    # One fragment has no rows, and another one row less.
    delete_positions(table, path, [0, 3, *range(8, 18), 24], inline)
    result = materialize(docs(table), local)
    assert metadata(result, "clean")["fragments_computed"] == 2
    assert ids(tmp_path) == [1, 2, 4, 5, 6, 7, *range(18, 24), *range(100, 125)]
    delete_positions(table, path, range(25), inline)
    materialize(docs(table), local)
    assert ids(tmp_path) == list(range(100, 125))


def test_partition_columns_are_columns_of_their_types(tmp_path, local, materialize):
    table = tmp_path / "t"
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456)
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
    given = rows([1, 2], **named)
    write_deltalake(table, given, partition_by=list(named))
    expected = {name: values.to_pylist() for name, values in named.items()}
    expected["word"] = ["it's/x y%", None]  # Delta's partitions have no empty texts
    read = docs(table, [*named, "n"])
    materialize(read, local)
    found = read_stage(tmp_path / "store", "docs", "clean").sort_by("id")
    for name, values in named.items():
        assert found.schema.field(name).type == values.type
        assert found[name].to_pylist() == expected[name]
    shown = {f"{name}_": f"{name}::VARCHAR" for name in named}
    where = "(size = 7 AND moment < zoned + INTERVAL 1 HOUR) OR day IS NULL"
    computed = vd.Pipeline("more", source=vd.delta(str(table)), id="id")
    computed.project("clean", {**shown, "day": "day"}, where=where)
    materialize(computed, local)
    found = read_stage(tmp_path / "store", "more", "clean").sort_by("id")
    assert found["day"].to_pylist() == expected["day"]
    assert found["zoned_"].to_pylist() == ["2024-05-06 07:08:09.123456+00", None]
    assert found["price_"].to_pylist() == ["1.50", None]
    step = vd.trace(read["clean"], 1, store=str(tmp_path / "store")).steps[0]
    assert Path(step.url.removeprefix("file://")).is_file()


def test_partitions_by_filter(tmp_path, local, materialize):
    table = tmp_path / "t"
    write_deltalake(table, rows(range(20), day=["it's"] * 10 + ["b"] * 10), partition_by=["day"])
    write_deltalake(table, rows(range(100, 105), day=["it's"] * 5), mode="append")
    keys = ["it's", "b", "none"]

    def filtered(text: str, **given: Any) -> vd.Pipeline:
        return docs(table, ("n", "day"), keys, filter=text, **given)

    by_day = "day = '{partition_key}'"
    for key, expected in zip(keys, ([*range(10), *range(100, 105)], list(range(10, 20)))):
        materialize(filtered(by_day), local, partition=key)
        assert ids(tmp_path, key) == expected
    text = failure(materialize(filtered(by_day), local, partition="none", raises=False))
    assert f"\"{table} where day = 'none'\" has no rows" in text
    materialize(filtered(by_day, allow_empty=True), local, partition="none")
    assert ids(tmp_path, "none") == []

    # A commit to another partition of the table leaves this one as it is.
    write_deltalake(table, rows(range(200, 205), day=["b"] * 5), mode="append")
    result = materialize(filtered(by_day), local, partition="it's")
    assert metadata(result, "clean")["fragments_computed"] == 0
    result = materialize(filtered(by_day), local, partition="b")
    assert metadata(result, "clean")["fragments_computed"] == 1

    # Rows that do not follow from the partition are counted by reading the filter's columns.
    narrowed = f"{by_day} AND (n < 30 OR n > 1020) AND text <> 'text 1'"
    materialize(filtered(narrowed), local, partition="it's")
    assert ids(tmp_path, "it's") == [0, 2, 103, 104]
    store = str(tmp_path / "store")
    assert vd.trace(filtered(narrowed)["clean"], 104, "it's", store=store).steps[0].row == 1
    materialize(filtered("id < 5 OR day = '{partition_key}'"), local, partition="b")
    assert ids(tmp_path, "b") == [*range(5), *range(10, 20), *range(200, 205)]


def read(table: Path, text: str) -> tuple[int, list[int]]:
    """Return the number of files that a filter selects, and the ids of its rows."""
    source = vd.delta(str(table), filter=text)
    files = source.list_files([None], "here")[None]
    found = source.split(files, FragmentRule(10), "here")
    context = ReadContext("here")
    parts = [source.for_workers().read(each, found.schema, context) for each in found.fragments]
    return len(files), sorted(pa.concat_tables(parts)["id"].to_pylist())


def test_statistics_skip_files(tmp_path):
    table = tmp_path / "t"
    start = datetime.datetime(2024, 1, 1)
    for hour in range(4):
        time = pa.array([start + datetime.timedelta(hours=hour)] * 5, pa.timestamp("us"))
        names = [f"{hour}-{i}" for i in range(5)]
        price = pa.array([decimal.Decimal("1.50")] * 5, pa.decimal128(9, 2))
        more = {"moment": time, "name": names, "price": price}
        write_deltalake(table, rows(range(hour * 5, hour * 5 + 5), **more), mode="append")
    for text, files, expected in (
        ("moment >= '2024-01-01 02:00:00'", 2, list(range(10, 20))),
        ("'2024-01-01 01:00:00' > moment AND n <> 20", 1, [0, 1, 3, 4]),
        ("id BETWEEN 4 AND 5", 2, [4, 5]),
        ("name IN ('1-1', '2-2')", 2, [6, 12]),
        ("name = '3-4'", 1, [19]),
        ("n = 50", 1, [5]),
        ("n = 50.0", 4, [5]),
        ("price > 1.499", 4, list(range(20))),
        ("id % 10 = 0", 4, [0, 10]),
        ("text = 'text 3'", 1, [3]),
        ("replace(name, '-', '')::INT = 12 AND id < 10", 2, [7]),
    ):
        assert read(table, text) == (files, expected), text
    numbers = tmp_path / "numbers"  # they are ordered otherwise as texts
    write_deltalake(numbers, rows([1, 2], word=["9", "10"]))
    write_deltalake(numbers, rows([3], word=["+8"]), mode="append")
    for text in ("word IN (10, 8)", "word < '2'"):
        assert read(numbers, text)[1] == [2, 3]


def test_a_filter_over_deleted_rows(tmp_path, local, materialize):
    table = tmp_path / "t"
    write_deltalake(table, rows(range(25)))
    delete_positions(table, log_actions(table, "add")[0]["path"], [2, 4, 11, 20])
    materialize(docs(table, filter="n % 20 = 0"), local)
    assert ids(tmp_path) == [0, 6, 8, 10, 12, 14, 16, 18, 22, 24]
    more = docs(table, filter="n % 20 = 0")
    kept = more.project("few", {"twice": "n * 2"}, where="id > 10")
    materialize(more, local)
    found = read_stage(tmp_path / "store", "docs", kept.name)
    assert found["id"].to_pylist() == [12, 14, 16, 18, 22, 24]


def test_columns_that_are_added_and_widened(tmp_path, local, materialize):
    table = tmp_path / "t"
    write_deltalake(table, rows(range(5)))
    more = rows(range(100, 105), extra=["e"] * 5)
    write_deltalake(table, more, mode="append", schema_mode="merge")
    materialize(docs(table, ("n", "extra")), local)
    found = read_stage(tmp_path / "store", "docs", "clean").sort_by("id")
    assert found["extra"].to_pylist() == [None] * 5 + ["e"] * 5

    # As Spark does: the type is changed in the schema, and old files keep theirs.
    text = log_actions(table, "metaData")[-1]
    text = {**text, "schemaString": text["schemaString"].replace('"integer"', '"long"')}
    features = {"readerFeatures": ["typeWidening"], "writerFeatures": ["typeWidening"]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    commit(table, [{"protocol": protocol}, {"metaData": text}])
    pipeline = docs(table, ("n", "extra"))
    pipeline.project("few", {"big": "n + 4000000000"}, where="n >= 20 AND extra IS NULL")
    materialize(pipeline, local)
    assert read_stage(tmp_path / "store", "docs", "clean").schema.field("n").type == pa.int64()
    found = read_stage(tmp_path / "store", "docs", "typed")
    assert set(found["types"].to_pylist()) == {"int64"}
    found = read_stage(tmp_path / "store", "docs", "few")
    assert found["big"].to_pylist() == [4_000_000_020, 4_000_000_030, 4_000_000_040]


def test_only_the_columns_that_are_read_count(tmp_path, local, materialize):
    table = tmp_path / "t"
    write_deltalake(table, rows(range(5)))
    few = docs(table, ("text",), columns=["id", "n", "text"])
    materialize(few, local)
    more = rows(range(100, 105), extra=["e"] * 5)
    write_deltalake(table, more, mode="append", schema_mode="merge")
    result = materialize(few, local)
    assert metadata(result, "clean")["fragments_computed"] == 1
    result = materialize(docs(table, ("text", "extra")), local)
    assert metadata(result, "clean")["fragments_computed"] == 2


def test_a_table_on_s3(tmp_path, local, materialize, s3):
    url = f"s3://lake/{uuid.uuid4().hex}/a table"
    options = table_options(Location(url, s3))
    given = rows(range(25), day=["it's/x"] * 10 + ["b"] * 15)
    write_deltalake(url, given, partition_by=["day"], storage_options=options)

    def pipeline() -> vd.Pipeline:
        text = "day = '{partition_key}' AND n <> 110"
        return docs(url, ("n", "day"), ["it's/x", "b"], filter=text, storage_options=s3)

    materialize(pipeline(), local, partition="b")
    assert ids(tmp_path, "b") == [10, *range(12, 25)]
    write_deltalake(url, rows(range(30, 33), day=["b"] * 3), mode="append", storage_options=options)
    result = materialize(pipeline(), local, partition="b")
    assert metadata(result, "clean")["fragments_computed"] == 1
    materialize(pipeline(), local, partition="it's/x")
    assert ids(tmp_path, "it's/x") == list(range(10))
    step = vd.trace(pipeline()["clean"], 24, "b", store=str(tmp_path / "store")).steps[0]
    assert step.url.startswith(f"{url}/day=b/")
    assert step.row == 13
    assert len(pipeline().source.list_files(["b"], "here")["b"]) == 2, "of 3 files"
    for path in (tmp_path / "store").rglob("*.json"):
        assert s3["endpoint_url"] not in json.dumps(json.loads(path.read_text()))
