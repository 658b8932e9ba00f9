"""Casts of tables and columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from vane_dagster.types.casts import cast_table

CALL = pa.struct([("name", pa.string()), ("result", pa.null())])
"""As of messages with calls of tools, of which none has a result."""
CALLS = [[{"name": f"call {n}", "result": None} for n in range(count)] for count in (3, 0, 4)]
COLUMNS = {
    "calls": pa.array(CALLS, pa.list_(CALL)),
    "nothings": pa.array([[None] * 3, None, [None] * 2], pa.list_(pa.null())),
    "nested": pa.array([{"calls": each} for each in CALLS], pa.struct([("calls", pa.list_(CALL))])),
    "map": pa.array([[(c["name"], None) for c in e] for e in CALLS], pa.map_("string", pa.null())),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_lists_with_nulls_in_each_element_are_kept(column: str) -> None:
    values = COLUMNS[column]
    table = pa.table({"other": pa.array([1, 2, 3], pa.int8()), "x": values})
    schema = pa.schema([("x", values.type), ("other", pa.int64())])
    found = cast_table(table, schema)
    found.validate(full=True)
    assert (found.schema, found.to_pylist()) == (schema, table.select(schema.names).to_pylist())
