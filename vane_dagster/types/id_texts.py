r"""Ids of several columns as texts: exact, readable, and different for different values.

The texts of the values are joined by ``|``; in a value, ``|`` becomes ``\|`` and ``\`` becomes
``\\``. They are part of stored rows, so the text of a value never changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.types.kinds import is_bytes, is_text

SEPARATOR = "|"

_PARAMETRIC = re.compile(
    r"timestamp\[(?P<unit>\w+), tz=(?P<zone>.+)\]"
    r"|(?P<decimal>decimal\d+)\((?P<precision>\d+), (?P<scale>-?\d+)\)"
    r"|fixed_size_binary\[(?P<width>\d+)\]"
)


def is_identifying(kind: pa.DataType) -> bool:
    """Return whether values of a type have an exact text: numbers, text, times, bytes or bools."""
    exact = pa.types.is_primitive(kind) and not pa.types.is_duration(kind)
    return exact or is_text(kind) or is_bytes(kind) or bool(pa.types.is_decimal(kind))


def parse_kind(name: str) -> pa.DataType:
    """Return the type that `is_identifying` and has a name."""
    if (match := _PARAMETRIC.fullmatch(name)) is None:
        return pa.type_for_alias(name)
    if match["zone"]:
        return pa.timestamp(match["unit"], match["zone"])
    if match["decimal"]:
        return getattr(pa, match["decimal"])(int(match["precision"]), int(match["scale"]))
    return pa.binary(int(match["width"]))


def joined(columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Return the id of each row; null where a value is."""
    return pc.binary_join_element_wise(*map(texts, columns), SEPARATOR, null_handling="emit_null")


def texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the text of each value of a column: the same for equal values of one type."""
    kind = column.type
    if is_bytes(kind):
        shown = [None if v is None else v.hex() for v in column.to_pylist()]
        return pa.chunked_array([shown], pa.string())
    if pa.types.is_floating(kind):
        column = column.cast(pa.float32()) if kind == pa.float16() else column
        column = pc.add(column, pa.scalar(0.0, column.type))  # -0.0 equals 0.0
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    column = column.cast(pa.string())
    if is_text(kind):
        column = pc.replace_substring(column, "\\", "\\\\")
        return pc.replace_substring(column, SEPARATOR, f"\\{SEPARATOR}")
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        # Without trailing zeros of the fraction: the text does not depend on the unit.
        column = pc.replace_substring_regex(column, r"(\.\d*[1-9])0+(Z?)$", r"\1\2")
        column = pc.replace_substring_regex(column, r"\.0+(Z?)$", r"\1")
    return column
