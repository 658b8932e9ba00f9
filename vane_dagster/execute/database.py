"""The worker's DuckDB."""

from __future__ import annotations

import functools

import duckdb
import pyarrow as pa

from vane_dagster.declare.database import connect


@functools.lru_cache(maxsize=1)
def connection() -> duckdb.DuckDBPyConnection:
    """The worker's DuckDB, opened once, with what it imports to read Arrow tables."""
    opened = connect()
    opened.from_arrow(pa.table({"warm": [0]})).fetchall()
    return opened
