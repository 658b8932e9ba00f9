"""Kinds of column types, independent of their encoding."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


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


def is_vectors(kind: pa.DataType) -> bool:
    """Return whether a column holds floating-point vectors of one size, as lists or tensors."""
    is_tensor = isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 1
    has_size = is_tensor or pa.types.is_fixed_size_list(kind)
    return has_size and bool(pa.types.is_floating(kind.value_type))


def is_floats(kind: pa.DataType) -> bool:
    """Return whether a column holds vectors, or lists of floating-point numbers of any size."""
    return is_vectors(kind) or (is_list(kind) and bool(pa.types.is_floating(kind.value_type)))


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
