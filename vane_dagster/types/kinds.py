"""Kinds of columns, whatever their encoding."""

from __future__ import annotations

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds texts."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds one number a row."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists, of one size or any."""
    return bool(
        pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    )


def is_floats(kind: pa.DataType) -> bool:
    """Whether a column holds lists of floating-point numbers, as vectors are."""
    return is_list(kind) and bool(pa.types.is_floating(kind.value_type))


def is_numbers(kind: pa.DataType) -> bool:
    """Whether a column holds lists of numbers."""
    return is_list(kind) and is_number(kind.value_type)
