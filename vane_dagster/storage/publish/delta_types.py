"""Delta Lake's column types."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from vane_dagster.storage.publish.column_types import flat_type, held_type

_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(),
    pa.float16(): pa.float32(),
}  # fmt: skip
_HELD = {
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.binary(), pa.date32(),
}  # fmt: skip


def delta_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which a Delta table holds a column without loss; None if there is none."""
    return held_type(kind, _flat_type)


def _flat_type(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return flat_type(kind, _HELD, _WIDER)


def shape(schema: Any) -> dict[str, str]:
    """Return column names and types of a Delta schema, for messages and comparison."""
    fields = json.loads(schema.to_json())["fields"]
    return {
        field["name"]: (
            json.dumps(field["type"], sort_keys=True).strip('"')
            + ("" if field["nullable"] else " not null")
        )
        for field in fields
    }
