"""DuckDB, opened the same way in the driver and in every worker."""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path

import duckdb


def connect() -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory whose answers do not depend on the machine.

    One thread, since workers are the parallelism; rows in order; UTC, so that a type with a time
    zone is the same everywhere. It does not spill, which DuckDB does in ``.tmp`` in the current
    folder if no other is set.
    """
    opened = duckdb.connect()
    opened.execute("SET threads=1; SET preserve_insertion_order=true; SET TimeZone='UTC'")
    opened.execute("SET temp_directory=''")
    return opened


def spill_below(connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Has a DuckDB spill into a folder of its own, which it creates when needed and removes."""
    own = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
    connection.execute("SET temp_directory=?", [str(own)])


@functools.lru_cache(maxsize=1)
def shared() -> duckdb.DuckDBPyConnection:
    """This process's DuckDB, opened once."""
    return connect()
