"""Fragments of Parquet files, separate or grouped: keys, records, and what is read of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support import ingested
from support.data import write_source
from vane_dagster.sources import FragmentRule, SourceTable

RULE = FragmentRule(100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty files of five rows, and one of fifty."""
    for n in range(40):
        table = pa.table({"id": range(5 * n, 5 * n + 5), "n": range(5)})
        write_source(tmp_path, table, f"{n:03d}.parquet")
    write_source(tmp_path, pa.table({"id": range(500, 550), "n": range(50)}), "020-large.parquet")
    return tmp_path


def split(folder: Path, **given: str) -> SourceTable:
    return ingested.split(vd.parquet(str(folder), **given), RULE)


def test_files_are_separate_by_default(folder):
    fragments = split(folder).fragments
    assert len(fragments) == 41
    assert all(not fragment.files for fragment in fragments)
    assert vd.parquet(str(folder)).splitting == ""


def test_small_files_are_grouped(folder):
    fragments = split(folder, small_files="group").fragments
    assert len(fragments) < 20
    spans = [span for fragment in fragments for span in fragment.spans]
    assert sorted(span.url for span in spans) == [f.url for f in split(folder).fragments]
    for fragment in fragments:
        assert fragment.stop == sum(s.stop - s.start for s in fragment.spans) <= RULE.rows
        assert fragment.bytes > 0
    assert len({fragment.identity for fragment in fragments}) == len(fragments)
    assert [f.url for f in fragments] == sorted(f.url for f in fragments)
    assert vd.parquet(str(folder), small_files="group").splitting


def test_a_group_is_read_in_the_order_of_its_spans(folder):
    source = vd.parquet(str(folder), small_files="group")
    table = split(folder, small_files="group")
    fragment = max(table.fragments, key=lambda each: len(each.files))
    read = source.read(fragment, table.schema, "here")
    expected = [pq.read_table(span.url.removeprefix("file://")) for span in fragment.files]
    assert read.equals(pa.concat_tables(expected).cast(table.schema))
    last = fragment.files[-1]
    assert source.find(fragment.spans, table.schema.field("id"), read["id"][-1].as_py()) == (
        last,
        4,
    )
    assert source.find(fragment.spans, table.schema.field("id"), -1) is None


def test_a_partition_without_files_has_the_columns_of_the_last_file(tmp_path):
    source = vd.parquet(f"{tmp_path}/{{partition_key}}", allow_empty=True)
    with pytest.raises(vd.errors.SourceError, match="no Parquet file"):
        ingested.split(source, partition="b")
    write_source(tmp_path / "a", {"id": [1]})
    table = ingested.split(source, partition="b")
    assert (table.schema.names, table.fragments) == (["id"], ())


def test_a_file_without_rows_and_types_has_the_columns_of_others(tmp_path):
    source = vd.parquet(f"{tmp_path}/{{partition_key}}", allow_empty=True)
    write_source(tmp_path / "b", {"id": [], "x": []})
    assert ingested.split(source, partition="b").schema.types == [pa.null()] * 2
    write_source(tmp_path / "a", {"id": [1], "y": [None]})
    expected = pa.schema([("id", pa.int64()), ("y", pa.null())])
    for key in "abc":
        assert ingested.split(source, partition=key).schema.equals(expected)
    write_source(tmp_path / "b", {"id": ["k"]}, "more.parquet")
    assert ingested.read(source, partition="b").to_pydict() == {"id": ["k"]}


def test_an_unknown_way_with_small_files_is_refused():
    with pytest.raises(vd.errors.DefinitionError, match=r"vd.parquet: small_files is 'merge'"):
        # A wrong value is what is refused.
        vd.parquet("/data", small_files="merge")  # type: ignore[arg-type]  # the mistake
