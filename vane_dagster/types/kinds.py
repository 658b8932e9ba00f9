"""Predicates on column types, independent of their encoding."""

from __future__ import annotations

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds strings."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
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


def is_numbers(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of numbers."""
    return is_list(kind) and is_number(kind.value_type)
