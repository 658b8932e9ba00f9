"""Declarations of Delta tables, refused tables, and the details of their spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import vane_dagster as vd
from support.delta_tables import commit, log_actions, use_features
from vane_dagster.sources import FileSpan
from vane_dagster.sources.base import FragmentRule, ReadContext
from vane_dagster.sources.lake_source import LiveRows
from vane_dagster.sources.planned_read import read_planned
from vane_dagster.sources.schemas import FileColumns
from vane_dagster.types.duckdb_connection import shared
from vane_dagster.types.sql import conjuncts


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": ""}, "expected a path or a URL"),
        ({"url": "gs://lake/t"}, "expected a local path, s3:// or s3a://"),
        ({"url": "lake/a%20b"}, "holds '%'"),
        ({"url": "lake/{day}"}, "unknown placeholder {day}"),
        ({"url": "t", "version": True}, "expected a version number"),
        ({"url": "t", "version": 1.5}, "expected a version number"),
        ({"url": "t", "filter": " "}, "expected a row filter"),
        ({"url": "t", "filter": "n >"}, "is not valid SQL"),
        ({"url": "t", "columns": "n"}, "expected a list of names"),
    ],
)
def test_a_declaration_that_does_not_fit(given, words):
    with pytest.raises(vd.DefinitionError, match=r"vd\.delta") as caught:
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
        (vd.delta("t/{partition_key}"), None, "has no partitions_def"),
        (vd.delta("t", filter="d = '{partition_key}'"), None, "has no partitions_def"),
        (vd.delta("t", filter="d = '{partition_key.hour}'"), two, "the dimension 'hour'"),
    ):
        with pytest.raises(vd.DefinitionError, match=words):
            source.validate("here", partitions)


@pytest.mark.parametrize("deleted", [[], [100], list(range(100, 200)), [101, 150, 199]])
def test_details_are_read_as_they_were_written(deleted):
    mask = np.array([i not in deleted for i in range(100, 200)])
    common = pa.schema([("n", pa.int64()), ("day", pa.string())])
    columns = FileColumns.of(pa.schema([("n", pa.int32())]), common)
    detail = LiveRows(100, 40, mask).added_to(columns.detail({"day": "x"}))
    found = LiveRows.of(FileSpan("f", 40, 90, detail))
    assert found is not None
    assert (found.first, found.start, found.mask.tolist()) == (100, 40, mask.tolist())
    assert json.loads(detail)["constants"] == {"day": "x"}
    assert json.loads(detail)["cast"] == ["n"]
    assert LiveRows.of(FileSpan("f", 0, 1)) is None


def test_many_deleted_rows_have_a_small_detail():
    mask = np.ones(131_072, bool)
    mask[::100] = False
    assert len(LiveRows(0, 0, mask).added_to("")) < 2_000


def write(folder: Path, **more: Any) -> Path:
    write_deltalake(folder / "t", pa.table({"id": [1, 2], **more}))
    return folder / "t"


def listing(table: Path, **given: Any) -> Any:
    return vd.delta(str(table), **given).list_files([None], "here")[None]


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
        ("v2Checkpoint", None),
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
        ({"filter": "n > [1]"}, "The input has 'id"),
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
    with pytest.raises(vd.VaneError, match=r"columns 'N' and 'n' are the same name to SQL"):
        source.split(source.list_files([None], "here")[None], FragmentRule(10), "here")
    clash = write(tmp_path / "more", file_row_number=[1, 2])
    assert "rename it" in str(listing(clash))


@pytest.mark.parametrize("filter", [None, "n > 0"])
def test_a_data_file_that_is_vacuumed_before_it_is_read(filter, tmp_path):
    table = str(tmp_path / "t")
    write_deltalake(table, pa.table({"n": range(10)}))
    source = vd.delta(table, filter=filter)
    found = source.split(source.list_files([None], "here")[None], FragmentRule(100), "here")
    for file in (tmp_path / "t").glob("*.parquet"):
        file.unlink()
    reader, context = source.for_workers(), ReadContext("here", shared().cursor)
    words = r"here: data file .*\.parquet' of Delta table .* is gone; VACUUM"
    with pytest.raises(vd.errors.SourceError, match=words):
        reader.read(found.fragments[0], found.schema, context)
    files = source.list_files([None], "here")[None]
    with pytest.raises(vd.errors.SourceError, match=words):  # as workers do
        read_planned(reader, found.fragments[0], found.schema, files, context)
    if filter is None:
        with pytest.raises(vd.errors.SourceError, match=words):
            reader.project(found.fragments[0], found.schema, [("n", "n + 1")], None, context)


def test_the_columns_of_tables_with_placeholders_are_those_of_the_last(tmp_path):
    source = vd.delta(f"{tmp_path}/{{partition_key}}/t")
    with pytest.raises(vd.errors.SourceError, match="no Delta table at"):
        source.schema("here")
    write(tmp_path / "a")
    write(tmp_path / "b", n=[1, 2])
    assert source.schema("here").names == ["id", "n"]


def test_binary_partition_columns_are_refused(tmp_path):
    write_deltalake(tmp_path / "t", pa.table({"id": [1], "b": [b"x"]}), partition_by=["b"])
    assert "is partitioned by 'b', of the type BINARY" in str(listing(tmp_path / "t"))


def test_units_are_sorted_and_have_versions(tmp_path):
    table = write(tmp_path)
    before = listing(table)
    write_deltalake(table, pa.table({"id": [3]}), mode="append")
    after = listing(table)
    assert set(before) < set(after)
    assert list(after) == sorted(after, key=lambda record: record.url)
    assert [r.size for r in after] == [
        Path(r.url.removeprefix("file://")).stat().st_size for r in after
    ]
    filtered = listing(table, filter="id > 0")
    assert [r.url for r in filtered] == [r.url for r in after]
    assert {r.version for r in filtered}.isdisjoint(r.version for r in after)
    assert listing(table, version=0) == before
    assert DeltaTable(str(table)).version() == 1


def test_deletes_are_refused_without_deltalake(monkeypatch):
    monkeypatch.setattr("vane_dagster.sources.delta.find_spec", lambda name: None)
    with pytest.raises(vd.DefinitionError, match=r"Install vane-dagster\[delta\]"):
        vd.delta("t")


def test_filters_are_split_at_their_outer_ands():
    found = conjuncts("a = 1 AND (b = 2 AND (c = 3 OR d = 4)) AND NOT (e AND f)", "here")
    assert found == ("(a = 1)", "(b = 2)", "((c = 3) OR (d = 4))", "(NOT (e AND f))")
    assert conjuncts("a IS NULL", "here") == ("(a IS NULL)",)


def test_the_url_may_be_a_path():
    assert vd.delta(Path("lake/t")) == vd.delta("lake/t")
