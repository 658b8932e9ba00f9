"""The DuckDB connection of a worker."""

from __future__ import annotations

import functools

import duckdb
import pyarrow as pa

from vane_dagster._private_folder import worker_folder
from vane_dagster.types.duckdb_connection import shared, spill_below


@functools.lru_cache(maxsize=1)
def connection() -> duckdb.DuckDBPyConnection:
    """Return the worker's DuckDB connection, opened once.

    The first query imports the modules that DuckDB needs to read Arrow tables.
    """
    opened = shared()
    spill_below(opened, worker_folder("spill"))
    opened.from_arrow(pa.table({"warm": [0]})).fetchall()
    return opened
