"""DuckDB connections with the same configuration in the driver and in every worker."""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path

from vane_dagster._lazy import duckdb


def connect() -> duckdb.DuckDBPyConnection:
    """Open an in-memory DuckDB with results that do not depend on the machine.

    It uses one thread, because parallelism comes from the workers. It preserves row order, and uses
    UTC so that types with a time zone are the same everywhere. Spilling is disabled; otherwise
    DuckDB would spill to ``.tmp`` in the current folder.
    """
    opened = duckdb.connect()
    opened.execute("SET threads=1; SET preserve_insertion_order=true")
    opened.execute("SET GLOBAL TimeZone='UTC'")  # its cursors have it too
    opened.execute("SET temp_directory=''")
    return opened


def spill_below(connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Let a DuckDB spill into its own folder, which it creates on demand and removes."""
    own = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
    connection.execute("SET temp_directory=?", [str(own)])


@functools.lru_cache(maxsize=1)
def shared() -> duckdb.DuckDBPyConnection:
    """Return this process's shared DuckDB connection, opened once.

    A cursor of it opens about 100 times faster than a connection, and has temporary tables of its
    own.
    """
    return connect()
