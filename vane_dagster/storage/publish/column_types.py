"""Conversion of nested Arrow types to those that a table format holds."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from vane_dagster.types.tensors import is_tensor, storage_type


def held_type(
    kind: pa.DataType, flat: Callable[[pa.DataType], pa.DataType | None]
) -> pa.DataType | None:
    """Return the type in which a table holds a column without loss; None if there is none.

    A tensor is the flat list of its elements, in row-major order. Lists lose their fixed size.
    """
    if is_tensor(kind):
        return held_type(storage_type(kind), flat)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        value = held_type(kind.value_type, flat)
        return value and pa.list_(value)
    if pa.types.is_map(kind):
        key, value = held_type(kind.key_type, flat), held_type(kind.item_type, flat)
        return pa.map_(key, value) if key and value else None
    if pa.types.is_struct(kind) and kind.num_fields:
        kinds = [held_type(field.type, flat) for field in kind]
        pairs = [(field.name, found) for field, found in zip(kind, kinds) if found]
        return pa.struct(pairs) if len(pairs) == kind.num_fields else None
    return flat(kind)
