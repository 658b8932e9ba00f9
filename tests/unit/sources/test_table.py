"""Rows in memory as a source: what may be given, what identifies it, and its errors."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import dagster as dg
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import vane_dagster as vd
from support.ingested import RULE, listed, read, split
from vane_dagster.planning.source_code import pack_source
from vane_dagster.sources import FragmentRule, SourceTable
from vane_dagster.types.tensors import to_ndarray

COLUMNS = {"id": [1, 2, 3], "text": ["a", None, "c"], "x": [0.5, 1.5, 2.5]}
ROWS = pa.table(COLUMNS)

KINDS: dict[str, Any] = {
    "table": ROWS,
    "batch": ROWS.to_batches()[0],
    "reader": lambda: ROWS.to_reader(),
    "pandas": ROWS.to_pandas(),
    "named index": ROWS.to_pandas().set_index("id"),
    "polars": pl.from_arrow(ROWS),
    "lazy polars": pl.from_arrow(ROWS).lazy(),
    "duckdb": lambda: duckdb.from_arrow(ROWS),
    "dict": COLUMNS,
    "dict of arrays": {**COLUMNS, "id": np.array([1, 2, 3]), "text": ROWS["text"]},
    "list": ROWS.to_pylist(),
    "function": lambda: COLUMNS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_of_any_kind_are_the_same_source(kind, store):
    source = vd.table(KINDS[kind]() if kind == "reader" else KINDS[kind])
    assert source.schema("here").names == ["id", "text", "x"]
    assert listed(source) == listed(vd.table(ROWS))
    assert read(source, store=store).equals(ROWS)


def test_a_changed_row_changes_its_own_fragment(store):
    rows = pa.table({"id": range(5_000)})
    rule = FragmentRule(1_024)
    before = split(vd.table(rows), rule, store=store).fragments
    assert len(before) == 5
    grown = pa.concat_tables([rows, pa.table({"id": [5_000]})])
    changed = pa.table({"id": [*range(3_000), -1, *range(3_001, 5_000)]})
    for table in (grown, changed):
        now = split(vd.table(table), rule, store=store).fragments
        assert len({f.identity for f in now} - {f.identity for f in before}) == 1
        assert sum(f.stop - f.start for f in now) == len(table)


def test_a_table_is_written_once(store):
    source = vd.table(pa.table({"id": range(5_000)}))
    folder = store.root.child("~tables", "made")
    before = [split(source, FragmentRule(rows), store=store) for rows in (500, 5_000)]
    times = {name: info.modified for name, info in folder.entries().items()}
    assert len(times) == 1
    assert [len(table.fragments) for table in before] == [14, 1]
    split(source, FragmentRule(700), store=store)
    assert {name: info.modified for name, info in folder.entries().items()} == times
    # Files that were deleted are written again, under other names.
    folder.delete(list(times))
    assert split(source, store=store).fragments
    assert read(source, store=store)["id"].to_pylist() == list(range(5_000))
    assert len(folder.entries()) == 1
    assert not set(folder.entries()) & set(times)


def test_the_table_does_not_travel_with_tasks(store):
    assert len(pack_source(vd.table({"id": range(1_000_000)}).bind(store))) < 1_000


def test_rows_that_change_between_the_listing_and_the_copy_are_refused(store):
    values = np.arange(5_000)
    source = vd.table({"id": values})
    files = listed(source)
    values[17] = -1
    with pytest.raises(vd.errors.SourceError, match="has changed while the run was planned"):
        source.bind(store).split(files, RULE, "here")


def test_partitions(store):
    days = vd.table({"id": [1, 2, 3, 4], "day": ["a", "b", "a", "c"]}, partition_column="day")
    assert read(days, partition="a")["id"].to_pylist() == [1, 3]
    assert read(days, partition="b")["id"].to_pylist() == [2]
    changed = vd.table({"id": [1, 9, 3], "day": ["a", "b", "a"]}, partition_column="day")
    assert listed(changed, "a") == listed(days, "a")
    assert listed(changed, "b") != listed(days, "b")
    with pytest.raises(
        vd.errors.SourceError, match=r"day = x has no rows. It has rows of 'a', 'b', 'c'"
    ):
        listed(days, "x")


@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_times_at_midnight_are_days(zone):
    def rows(hour: int) -> pa.Array:
        local = pa.array([dt.datetime(2026, 1, 1, hour), dt.datetime(2026, 1, 2)])
        return pc.assume_timezone(local, zone) if zone else local

    days = vd.table({"id": [1, 2], "day": rows(0)}, partition_column="day")
    assert read(days, partition="2026-01-02")["id"].to_pylist() == [2]
    hours = vd.table({"id": [1, 2], "day": rows(1)}, partition_column="day")
    with pytest.raises(vd.errors.SourceError, match=r"It has rows of '2026-01-01 01:00"):
        listed(hours, "2026-01-01")


@pytest.mark.parametrize("days", [["a", None], [[1], [2]]])
def test_rows_without_a_partition_are_refused(days):
    source = vd.table({"id": [1, 2], "day": days}, partition_column="day")
    with pytest.raises(vd.errors.SourceError, match=r"'day' is .*, and not every row has a text"):
        listed(source, "a")


def test_an_empty_table_is_refused(store):
    empty = ROWS.slice(0, 0)
    with pytest.raises(vd.errors.SourceError, match="or allow_empty=True"):
        listed(vd.table(empty))
    allowed = vd.table(empty, allow_empty=True)
    assert split(allowed, store=store) == SourceTable(ROWS.schema, ())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "data is a builtins.int; expected pyarrow.Table"),
        ("a.parquet", r"Files are read by vd.parquet"),
        ([1, 2], "data is a builtins.list"),
        (lambda day: ROWS, "a function without parameters"),
    ],
)
def test_what_is_no_table_is_refused_where_it_is_declared(data, message):
    with pytest.raises(vd.errors.VaneError, match=message):
        vd.table(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pd.DataFrame({"a": [pd.DataFrame({"b": [1]})]}), "cannot be converted to Arrow"),
        ({"a": [1, "x"]}, "column 'a' cannot be converted to Arrow"),
        ({"a": [object()]}, "column 'a' cannot be converted to Arrow"),
        ({"a": [1], "b": [1, 2]}, "cannot be converted to Arrow.*all columns the same length"),
        ({}, "a table needs one or more columns"),
        ({1: [1]}, "cannot be converted to Arrow"),
        (pa.table([[1], [2]], ["a", "A"]), "'a' and 'A' are the same name"),
        (pa.table([[1], [2]], ["a", ""]), "a column has no name, which SQL needs; give it one"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "cannot be converted to Arrow: Duplicate"),
    ],
)
def test_rows_that_arrow_cannot_hold_are_refused_when_they_are_read(data, message):
    with pytest.raises(vd.errors.SourceError, match=message):
        listed(vd.table(data))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pd.period_range("2024-01", periods=2, freq="M"), r"is period\[M\].*by .dt.to_timestamp"),
        (pd.arrays.SparseArray([0, 1]), r"is Sparse\[int64, 0\].*by .sparse.to_dense"),
        (np.array([1j, 2]), r"is complex128.*of .real and .imag"),
    ],
)
def test_columns_of_pandas_that_arrow_has_no_type_for_are_refused(values, message):
    frame = pd.DataFrame({"n": [1, 2], "a": values})
    for data in (frame, frame.set_index("a"), {"a": values}, {"a": pd.Series(values)}):
        with pytest.raises(vd.errors.SourceError, match=f"column 'a' .*{message}"):
            listed(vd.table(data))


def test_objects_in_polars_are_refused():
    objects = pl.Series([uuid.UUID(int=1)], dtype=pl.Object)  # exported as addresses
    frame = pl.DataFrame({"a": objects})
    for data in (frame, frame.lazy(), {"a": objects}):
        with pytest.raises(vd.errors.SourceError, match=r"column 'a' .*is Object.*str\(value\)"):
            listed(vd.table(data))


def test_partitions_of_source_and_pipeline_have_to_fit():
    parts = dg.StaticPartitionsDefinition(["a"])
    days = vd.table({"id": [1], "day": ["a"]}, partition_column="day")
    with pytest.raises(vd.errors.DefinitionError, match="has partitions, unlike the pipeline"):
        vd.Pipeline("docs", source=days, id="id")
    with pytest.raises(vd.errors.DefinitionError, match="partition_column='day'"):
        vd.Pipeline("docs", source=vd.table(ROWS), id="id", partitions_def=parts)
    vd.Pipeline("docs", source=days, id="id", partitions_def=parts)


def test_a_function_is_called_once_and_not_by_the_declaration():
    calls = []

    def build() -> pa.Table:
        calls.append(1)
        return ROWS

    source = vd.table(build)
    pipeline = vd.Pipeline("docs", source=source, id="id")
    assert not calls
    assert pipeline.source_schema() == ROWS.schema
    listed(source)
    listed(source)
    assert calls == [1]


def test_arrays_of_several_dimensions_are_tensors(store):
    images = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    found = read(vd.table({"id": [1, 2], "image": images}))
    assert found["image"].type == vd.tensor("float32", (2, 3))
    np.testing.assert_array_equal(to_ndarray(found["image"].chunk(0)), images)
