"""Conversion of nested Arrow types to those that a table format holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pyarrow as pa

from vane_dagster.types.kinds import is_list
from vane_dagster.types.schema import plain_type
from vane_dagster.types.tensors import storage_type

_Convert = Callable[[pa.DataType], pa.DataType | None]


def held_type(kind: pa.DataType, flat: _Convert, keeps_size: bool = False) -> pa.DataType | None:
    """Return the type in which a table holds a column without loss; None if there is none.

    A tensor becomes the flat list of its elements, in row-major order. Lists lose their fixed
    size; with `keeps_size`, vectors keep theirs.
    """
    kind = storage_type(plain_type(kind))
    is_fixed = pa.types.is_fixed_size_list(kind)
    if is_fixed or is_list(kind):
        value = held_type(kind.value_type, flat, keeps_size)
        is_vector = value and (pa.types.is_primitive(value) or pa.types.is_fixed_size_list(value))
        return value and pa.list_(
            value, kind.list_size if is_fixed and is_vector and keeps_size else -1
        )
    if pa.types.is_map(kind):
        key, value = (held_type(each, flat, keeps_size) for each in (kind.key_type, kind.item_type))
        return pa.map_(key, value) if key and value else None
    if pa.types.is_struct(kind):
        held = [(field.name, held_type(field.type, flat, keeps_size)) for field in kind]
        return pa.struct(held) if held and all(held_kind for _, held_kind in held) else None
    return flat(kind)


def flat_type(
    kind: pa.DataType,
    held: Collection[pa.DataType],
    wider: Mapping[pa.DataType, pa.DataType],
) -> pa.DataType | None:
    """Return the type in which a table stores a column that is not nested; None if there is none.

    Types in `held` are stored as they are, those in `wider` as the type that they map to.
    Decimals of 128 bits are stored as they are, and timestamps in microseconds.
    """
    if kind in held or (pa.types.is_decimal128(kind) and kind.scale >= 0):
        return kind
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", "UTC" if kind.tz else None)
    return wider.get(kind)
