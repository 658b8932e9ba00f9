"""Declarations of Delta tables, refused tables, and the details of their spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import dagster as dg
import duckdb
import pyarrow as pa
import pytest
from deltalake import write_deltalake

import vane_dagster as vd
from support.delta_tables import commit, delete_positions, log_actions, use_features
from support.ingested import rows
from vane_dagster.sources.base import FragmentRule, default_rule
from vane_dagster.sources.planned_read import read_planned


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": ""}, "expected a path or a URL"),
        ({"url": "gs://lake/t"}, "expected a local path, s3:// or s3a://"),
        ({"url": "lake/a%20b"}, "holds '%'"),
        ({"url": "lake/{day}"}, "unknown placeholder {day}"),
        ({"url": "t", "filter": "n >"}, "is not valid SQL"),
        ({"url": "t", "columns": "n"}, "expected a list of names"),
        ({"url": "t", "version": "5"}, "expected the number of a version, or a time"),
    ],
)
def test_a_declaration_that_does_not_fit(given, words):
    with pytest.raises(vd.errors.DefinitionError, match=r"vd\.delta") as caught:
        vd.delta(**given)
    assert words in str(caught.value)


def test_a_source_fits_the_partitions():
    days = dg.StaticPartitionsDefinition(["a"])
    two = dg.MultiPartitionsDefinition({"day": days, "place": days})
    vd.delta("t", filter="d = '{partition_key}'").validate("here", days)
    vd.delta("t/{partition_key}").validate("here", days)
    vd.delta("t/{partition_key.day}", filter="p = '{partition_key.place}'").validate("here", two)
    vd.delta("t", filter="n > 1").validate("here", None)
    for source, partitions, words in (
        (vd.delta("t", filter="n > 1"), days, "every partition would have the same rows"),
        (vd.iceberg("prod", "db.t"), days, "every partition would have the same rows"),
        (vd.delta("t/{partition_key}"), None, "has no partitions_def"),
        (vd.delta("t", filter="d = '{partition_key}'"), None, "has no partitions_def"),
        (vd.delta("t", filter="d = '{partition_key.hour}'"), two, "the dimension 'hour'"),
        (vd.delta("t", filter="d = '{partition_ends}'"), days, "unknown placeholder"),
    ):
        with pytest.raises(vd.errors.DefinitionError, match=words):
            source.validate("here", partitions)


def write(folder: Path, **more: Any) -> Path:
    write_deltalake(folder / "t", pa.table({"id": [1, 2], **more}))
    return folder / "t"


def listing(table: Path, **given: Any) -> Any:
    return vd.delta(str(table), **given).list_files([None], "here")[None]


@pytest.mark.parametrize("time", ["2200-01-31", "2200-01-31T18:00", "2200-01-31 18:00:00+02:00"])
def test_a_version_by_its_time(time, tmp_path):
    assert len(listing(write(tmp_path), version=time)) == 1


def test_column_mapping_is_refused(tmp_path):
    table = write(tmp_path)
    metadata = log_actions(table, "metaData")[-1]
    schema = json.loads(metadata["schemaString"])
    names = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    schema["fields"][0]["metadata"] = names
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {"delta.columnMapping.mode": "name"}
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    commit(table, [{"protocol": protocol}, {"metaData": metadata}])
    error = listing(table)
    assert isinstance(error, vd.errors.SourceError)
    assert "uses 'columnMapping', which vd.delta cannot read" in str(error)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ("variantType", "uses 'variantType', which vd.delta cannot read"),
        ("feature of the future", "cannot be read"),
        ("timestampNtz", None),
    ],
)
def test_features_of_tables(feature, words, tmp_path):
    table = write(tmp_path)
    try:
        use_features(table, feature)
    finally:
        found = listing(table)
    if words is None:
        assert len(found) == 1
    else:
        assert words in str(found)


def test_bad_columns_and_filters(tmp_path):
    table = write(tmp_path, n=[1, 2])
    for given, words in (
        ({"columns": ["x"]}, "has no column 'x'; it has 'id', 'n'"),
        ({"filter": "idx > 1"}, "The input has 'id', 'n'. Did you mean 'id'?"),
        ({"filter": "sum(n) > 1"}, "aggregate"),
        ({"filter": "n > random()"}, "not a function of the row"),
    ):
        error = listing(table, **given)
        assert isinstance(error, vd.errors.SourceError), given
        assert words in str(error)
    other_case = write(tmp_path / "case", N=[1, 2])
    metadata = log_actions(other_case, "metaData")[-1]
    metadata["schemaString"] = metadata["schemaString"].replace('"N"', '"n"')
    commit(other_case, [{"metaData": metadata}])
    source = vd.delta(str(other_case))
    with pytest.raises(vd.errors.VaneError, match=r"columns 'N' and 'n' are the same name to SQL"):
        source.split(source.list_files([None], "here")[None], FragmentRule(10), "here")


@pytest.mark.parametrize(
    "filter", ["n < 5/2", "n < 2^3", "n = 5/2+1/2", "n*1 < 5/2", "abs(n) < 3", "n IN (2, 20)"]
)
def test_a_filter_selects_the_same_rows_with_statistics_of_files(filter, tmp_path):
    for numbers in ([2, 2], [3, 9], [8, 20]):
        write_deltalake(tmp_path / "t", pa.table({"n": numbers}), mode="append")
    source = vd.delta(str(tmp_path / "t"), filter=filter)
    files = source.required(source.list_files([None], "here")[None], None, "here")
    found = sum(f.stop - f.start for f in source.split(files, default_rule([]), "here").fragments)
    every = pa.table({"n": [2, 2, 3, 9, 8, 20]})  # noqa: F841  read by DuckDB
    assert duckdb.sql(f"SELECT count(*) FROM every WHERE {filter}").fetchall() == [(found,)]


@pytest.mark.parametrize("filter", [None, "n > 0"])
def test_a_data_file_that_is_vacuumed_before_it_is_read(filter, tmp_path):
    table = str(tmp_path / "t")
    write_deltalake(table, pa.table({"n": range(10)}))
    source = vd.delta(table, filter=filter)
    found = source.split(source.list_files([None], "here")[None], FragmentRule(100), "here")
    for file in (tmp_path / "t").glob("*.parquet"):
        file.unlink()
    reader = source.for_workers()
    words = r"here: .*\.parquet' cannot be read: .*If the file is missing, VACUUM has deleted"
    with pytest.raises(vd.errors.SourceError, match=words):
        reader.read(found.fragments[0], found.schema, "here")
    files = source.list_files([None], "here")[None]
    with pytest.raises(vd.errors.SourceError, match=words):  # as workers do
        read_planned(reader, found.fragments[0], found.schema, files, "here")


def test_the_columns_of_a_table_for_each_partition_are_known_in_a_run_alone(tmp_path):
    with pytest.raises(vd.errors.DefinitionError, match="are known only in a run"):
        vd.delta(f"{tmp_path}/{{partition_key}}/t").schema("here")


def test_binary_partition_columns_are_refused(tmp_path):
    write_deltalake(tmp_path / "t", pa.table({"id": [1], "b": [b"x"]}), partition_by=["b"])
    assert "is partitioned by 'b', of the type BINARY" in str(listing(tmp_path / "t"))


@pytest.mark.parametrize("path", ["", "München.parquet", "a%20b.parquet"])
def test_rows_that_deletion_vectors_delete_are_not_read(tmp_path, path):
    table = tmp_path / "t"
    write_deltalake(table, pa.table({"id": range(25)}))
    add = log_actions(table, "add")[0]
    if path:
        (table / add["path"]).rename(table / unquote(path))
        removed = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
        commit(table, [{"remove": removed}, {"add": {**add, "path": path}}])
    path = path or add["path"]
    for deleted in ({0, 3, 24}, {0, 3, *range(8, 18), 24}, set(range(25))):
        delete_positions(table, path, deleted)
        found = rows(vd.delta(str(table)), FragmentRule(10))
        assert [row["id"] for row in found] == [i for i in range(25) if i not in deleted]
