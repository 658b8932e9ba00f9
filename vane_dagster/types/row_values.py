"""Values of single rows: of a column for Python code, and the types of what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.types.kinds import is_list
from vane_dagster.types.tensors import array_rows, is_multidimensional


def row_values(column: pa.ChunkedArray) -> Sequence[Any]:
    """Return the value of each row, for functions that are called row by row.

    Tensors and nested fixed-size lists of numbers are arrays of their shape, copied; scalars are
    Python values, lists are lists, structs are dicts; null is None.

    Args:
        column: The column.
    """
    kind = column.type
    if is_multidimensional(kind):
        return array_rows(column)
    if pa.types.is_struct(kind) and _holds_arrays(kind):
        fields = [row_values(pc.struct_field(column, [i])) for i in range(kind.num_fields)]
        named = [dict(zip((field.name for field in kind), row)) for row in zip(*fields)]
        return _where_valid(named, column)
    if is_list(kind) and _holds_arrays(kind):
        lengths = pc.list_value_length(column).to_pylist()
        values = iter(row_values(pc.list_flatten(column)))
        return [None if n is None else [next(values) for _ in range(n)] for n in lengths]
    found: list[Any] = column.to_pylist()
    return found


def _where_valid(values: Sequence[Any], column: pa.ChunkedArray) -> list[Any]:
    return [v if ok else None for v, ok in zip(values, column.is_valid().to_pylist())]


def _holds_arrays(kind: pa.DataType) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return is_multidimensional(kind) or any(map(_holds_arrays, inner))


def as_found(kind: pa.DataType, found: pa.DataType) -> pa.DataType:
    """Return a type with floats and bools in place of integers where such were found.

    Arrow cuts the fractions off floats that it converts to integers; a later cast does not.

    Args:
        kind: The type.
        found: The inferred type of the values.
    """
    if pa.types.is_integer(kind):
        return found if pa.types.is_floating(found) or pa.types.is_boolean(found) else kind
    if pa.types.is_struct(kind) and pa.types.is_struct(found):
        types = {field.name: field.type for field in found}
        return pa.struct([f.with_type(as_found(f.type, types.get(f.name, f.type))) for f in kind])
    if is_list(kind) and is_list(found):
        value = kind.value_field.with_type(as_found(kind.value_type, found.value_type))
        return pa.list_(value, kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
    return kind
