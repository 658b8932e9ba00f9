"""DuckDB, opened the same way in the driver and in every worker."""

from __future__ import annotations

import duckdb


def connect() -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory whose answers do not depend on the machine.

    One thread, since workers are the parallelism; rows in order; UTC, so that a type with a time
    zone is the same everywhere.
    """
    opened = duckdb.connect()
    opened.execute("SET threads=1; SET preserve_insertion_order=true; SET TimeZone='UTC'")
    return opened
