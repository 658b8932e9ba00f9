"""The contract of reading a store on any file system: tests over the fixture `store`."""

from __future__ import annotations

import gc
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import vane_dagster as vd
from support.data import column_of
from support.stored import FORMS, KEYS, ids, keep, table


def columns_of(read: Any) -> list[str]:
    if isinstance(read, (ds.Dataset, pa.RecordBatchReader)):
        return list(read.schema.names)
    if isinstance(read, pl.LazyFrame):
        return read.collect_schema().names()
    return list(getattr(read, "column_names", None) or read.columns)


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_partitions_in_every_form(store, form):
    for number, key in enumerate(KEYS):
        keep(store, "raw/docs", key, table(10 * number, 4))

    one = vd.load("raw/docs", "day=2", as_=form, store=store)
    some = vd.load("raw/docs", ["DE / 3", "2026-01-01"], as_=form, store=store)
    whole = vd.load("raw/docs", as_=form, columns=["text", "id"], store=store)

    assert isinstance(one, form)
    assert columns_of(one) == ["id", "text", "e"]
    assert ids(one) == [10, 11, 12, 13]
    assert ids(some) == [20, 21, 22, 23, 0, 1, 2, 3]
    assert columns_of(whole) == ["text", "id"]
    assert ids(whole) == [0, 1, 2, 3, 20, 21, 22, 23, 10, 11, 12, 13], "sorted by key"


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_rows_with_their_partition(store, form):
    keep(store, "raw/docs", "day=2", table(10, 2))
    keep(store, "raw/docs", "day=1", table(0, 1))
    keep(store, "raw/docs", "day=3", table(0, 0))
    keep(store, "raw/whole", None, table(0, 2))

    def load(path: str = "raw/docs", **options: Any) -> Any:
        return vd.load(path, as_=form, store=store, partition_column="day", **options)

    assert columns_of(load()) == ["id", "text", "e", "day"]
    assert column_of(load(), "day") == ["day=1", "day=2", "day=2"]
    assert ids(load()) == [0, 10, 11]
    assert columns_of(load(columns=["id"])) == ["id", "day"]
    assert column_of(load(partitions="day=3"), "day") == []
    assert [*pd.isna(column_of(load("raw/whole"), "day"))] == [True, True]
    with pytest.raises(vd.errors.StoreError, match="has a column 'text'; give partition_column"):
        vd.load("raw/docs", as_=form, store=store, partition_column="text")


def test_a_relation_keeps_its_connection(store):
    keep(store, "docs", None, table(0, 100))
    derived = vd.load("docs", as_=duckdb.DuckDBPyRelation, store=store).filter("id < 3")
    gc.collect()
    assert ids(derived) == [0, 1, 2]
    assert derived.aggregate("sum(e[2])").fetchall() == [(1.5,)]
    other = vd.load("docs", as_=duckdb.DuckDBPyRelation, store=store)
    assert other.set_alias("o").count("*").fetchall() == [(100,)]


def test_a_part_that_no_manifest_names_is_never_read(store):
    kept = keep(store, "docs", "a", table(0, 3))
    folder = store.parts(kept.pipeline, kept.stage, "a")
    sink = pa.BufferOutputStream()
    pq.write_table(table(90, 3), sink)
    folder.write(f"{'a' * 40}-{'b' * 16}.parquet", sink.getvalue())
    for form in FORMS:
        for partition in ("a", None):
            assert ids(vd.load("docs", partition, as_=form, store=store)) == [0, 1, 2]


__all__ = [name for name in dir() if name.startswith("test_")]
