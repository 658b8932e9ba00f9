"""The worker's DuckDB."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import duckdb
import pyarrow as pa

from vane_dagster._private_folder import private_folder, user_folder
from vane_dagster.compute.processes import MARK
from vane_dagster.types.duckdb_connection import shared, spill_below


@functools.lru_cache(maxsize=1)
def connection() -> duckdb.DuckDBPyConnection:
    """The worker's DuckDB, opened once, with what it imports to read Arrow tables."""
    opened = shared()
    spill_below(opened, _spill_root())
    opened.from_arrow(pa.table({"warm": [0]})).fetchall()
    return opened


def _spill_root() -> Path:
    """The private folder for what DuckDB does not hold in memory: see `host.code_root`."""
    if head := os.environ.get(MARK):
        return private_folder(Path(head, "spill"))
    return user_folder("spill")
