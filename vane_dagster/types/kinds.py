"""Kinds of column types, independent of their encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._lazy import pc


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds strings."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether a column holds bytes."""
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Return whether a column holds one number per row."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column holds lists, of fixed or variable size."""
    return bool(
        pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    )


def is_floats(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of floating-point numbers, such as vectors."""
    return is_list(kind) and bool(pa.types.is_floating(kind.value_type))


def holds(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a test is true of a type, or of one inside of it."""
    return test(kind) or any(holds(kind.field(i).type, test) for i in range(kind.num_fields))


def mapped(kind: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type in which those of single values are converted, also inside of it."""
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(mapped(kind.value_type, convert), kind.list_size)
    if is_list(kind):
        return pa.list_(mapped(kind.value_type, convert))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, mapped(f.type, convert)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(mapped(kind.key_type, convert), mapped(kind.item_type, convert))
    return convert(kind)


def is_list_view(kind: pa.DataType) -> bool:
    """Return whether a column holds list views."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def as_lists(views: Any) -> pa.ChunkedArray:
    """Convert list views to lists in row order; Arrow's own cast keeps the offsets as they are."""
    chunks = []
    for chunk in views.chunks if isinstance(views, pa.ChunkedArray) else [views]:
        lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        chunks.append(pa.LargeListArray.from_arrays(offsets, chunk.flatten(), mask=chunk.is_null()))
    return pa.chunked_array(chunks, pa.large_list(views.type.value_type))
