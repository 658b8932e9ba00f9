"""Stored assets to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from support.data import column_of
from vane_dagster.storage.asset_writer import write_asset
from vane_dagster.storage.dataframes import batches
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

KEYS = ("2026-01-01", "day=2", "DE / 3")
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string()), ("e", pa.list_(pa.float32(), 2))])
FORMS = [
    pa.Table,
    ds.Dataset,
    pa.RecordBatchReader,
    pd.DataFrame,
    pl.DataFrame,
    pl.LazyFrame,
    duckdb.DuckDBPyRelation,
]


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return Store(StoragePath(str(tmp_path / "store")))


def table(start: int, rows: int) -> pa.Table:
    numbers = range(start, start + rows)
    columns = [list(numbers), [f"t{n}" for n in numbers], [[n, n / 2] for n in numbers]]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA)


def keep(store: Store, path: str, partition: str | None, rows: Any) -> Any:
    return write_asset(store, path.split("/"), "run", partition, batches(rows, path))[0]


def ids(read: Any) -> list[int]:
    return column_of(read, "id")
