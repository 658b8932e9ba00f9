"""The values of rows, for Python code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.types.kinds import holds, is_list
from vane_dagster.types.tensors import array_rows, is_multidimensional


def row_values(column: pa.ChunkedArray) -> Sequence[Any]:
    """Return the value of each row, for functions that are called row by row.

    Tensors and nested fixed-size lists of numbers are arrays of their shape, copied; scalars are
    Python values, lists are lists, structs are dicts; null is None. Times of day are cut to the
    microseconds that Python's class holds.
    """
    kind = column.type
    if is_multidimensional(kind):
        return array_rows(column)
    if pa.types.is_struct(kind) and holds_arrays(kind):
        fields = [row_values(pc.struct_field(column, [i])) for i in range(kind.num_fields)]
        named = [dict(zip((field.name for field in kind), row)) for row in zip(*fields)]
        return [v if ok else None for v, ok in zip(named, column.is_valid().to_pylist())]
    if is_list(kind) and holds_arrays(kind):
        lengths = pc.list_value_length(column).to_pylist()
        values = iter(row_values(pc.list_flatten(column)))
        return [None if n is None else [next(values) for _ in range(n)] for n in lengths]
    rows: list[Any] = column.to_pylist()
    return rows


def holds_arrays(kind: pa.DataType) -> bool:
    """Return whether a type is one of arrays of several dimensions, or has one inside."""
    return holds(kind, is_multidimensional)
