"""The worker's DuckDB: its connection, and expressions that fail while rows are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import duckdb
import pyarrow as pa

from vane_dagster._private_folder import worker_folder
from vane_dagster.errors import SchemaError
from vane_dagster.types.duckdb_connection import shared, spill_below
from vane_dagster.worker.protocol import Work

_Run = Callable[[Sequence[tuple[str, str]], str | None], pa.Table]


@functools.lru_cache(maxsize=1)
def connection() -> duckdb.DuckDBPyConnection:
    """The worker's DuckDB, opened once, with what it imports to read Arrow tables."""
    opened = shared()
    spill_below(opened, worker_folder("spill"))
    opened.from_arrow(pa.table({"warm": [0]})).fetchall()
    return opened


def expression_error(
    columns: Sequence[tuple[str, str]], where: str | None, run: _Run, error: Exception, work: Work
) -> SchemaError:
    """The error of a projection, with the expression that fails.

    Args:
        columns: Names and expressions.
        where: The filter.
        run: Runs some of the columns with a filter, to find the one that fails.
        error: What DuckDB raised.
        work: Its location, for the message.
    """
    alone = [(f"column {name!r} = {text!r}", [(name, text)]) for name, text in columns]
    filters = [(f"where = {where!r}", [("x", "1")])] if where else []
    label = "a column of the project"
    for each, listed in filters + alone:
        try:
            run(listed, where)
        except duckdb.Error as found:
            label, error = each, found
            break
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return SchemaError(
        f"{work.culprit}: {label} fails for the value of a row: {reason}. Change the expression, "
        "for example to TRY_CAST or TRY, which give null, or leave such rows out with where="
    )
