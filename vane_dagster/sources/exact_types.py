"""Types of text that are read without loss.

DuckDB's readers round 1.5 to a BIGINT, drop the time of a DATE and the offset of a TIMESTAMP.
So such values are read as text, and Arrow converts them, which accepts exact ones alone. What Arrow
refuses, DuckDB converts, if the result is equal to the text.
"""

from __future__ import annotations

from collections.abc import Callable

import duckdb
import pyarrow as pa

from vane_dagster.types.schema import sql_name

IsStrict = Callable[[pa.DataType], bool]


class InexactError(ValueError):
    """A value does not fit the type of its column.

    Attributes:
        column: The column.
        kind: Its type.
    """

    def __init__(self, column: str, kind: pa.DataType) -> None:
        super().__init__(column)
        self.column, self.kind = column, kind


def raw_type(kind: pa.DataType, is_strict: IsStrict) -> pa.DataType:
    """Return a type with strings in place of the types that are converted exactly.

    Args:
        kind: The type.
        is_strict: Whether values of a type are read as text first.
    """
    if pa.types.is_list(kind):
        return pa.list_(raw_type(kind.value_type, is_strict))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, raw_type(f.type, is_strict)) for f in kind])
    return pa.string() if is_strict(kind) else kind


def convert(
    table: pa.Table, schema: pa.Schema, connect: Callable[[], duckdb.DuckDBPyConnection]
) -> pa.Table:
    """Convert columns that were read in their raw types.

    Args:
        table: The rows.
        schema: The columns, with their types.
        connect: Returns a DuckDB connection in UTC.

    Raises:
        InexactError: If a value does not fit.
    """
    return pa.table([_converted(table, f, connect) for f in schema], schema=schema)


def _converted(
    table: pa.Table, field: pa.Field, connect: Callable[[], duckdb.DuckDBPyConnection]
) -> pa.ChunkedArray:
    values = table.column(field.name)
    if values.type == field.type:
        return values
    try:
        return values.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        equal = _equal(field.type)
        if equal is None or values.type != pa.string():
            raise InexactError(field.name, field.type) from None
    casted = f"TRY_CAST(x AS {sql_name(field.type)}) AS y"
    fits = f"x IS NULL OR coalesce({equal}, false) AS fits"
    made = connect().from_arrow(pa.table({"x": values})).project(f"{casted}, {fits}")
    made = made.to_arrow_table()
    if not all(chunk.true_count == len(chunk) for chunk in made.column("fits").chunks):
        raise InexactError(field.name, field.type)
    return made.column("y").cast(field.type)


def _equal(kind: pa.DataType) -> str | None:
    """Return the SQL condition that a text `x` is exactly a value of a type; None if unknown."""
    name = sql_name(kind)
    if pa.types.is_integer(kind):
        return f"TRY_CAST(x AS DECIMAL(38, 18)) = TRY_CAST(x AS {name})"
    if pa.types.is_date(kind):
        return "TRY_CAST(x AS TIMESTAMPTZ) = TRY_CAST(x AS DATE)::TIMESTAMP::TIMESTAMPTZ"
    if pa.types.is_timestamp(kind) and kind.tz is None:
        in_zone = f"TRY_CAST(x AS TIMESTAMPTZ) = TRY_CAST(x AS {name})::TIMESTAMP::TIMESTAMPTZ"
        in_full = f"TRY_CAST(x AS TIMESTAMP_NS) = TRY_CAST(x AS {name})::TIMESTAMP_NS"
        return f"{in_zone} AND coalesce({in_full}, true)"
    if pa.types.is_floating(kind):
        return f"TRY_CAST(x AS {name}) IS NOT NULL AND lower(x) NOT IN ('true', 'false')"
    return None
