"""What rows show of the types of their columns, and how blocks and files are joined.

A schema stands for what rows show. A column of whole numbers that a double does not hold is not
nullable there, because with fractions it is text. Values without a common type are `MIXED`.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.sources.schemas import wider_type

MIXED = pa.dense_union([])
"""The type of a column with values that have no common one."""
LARGEST = 10**15
"""A double holds all whole numbers up to it, and more."""


def shown(name: str, values: pa.Array | pa.ChunkedArray) -> pa.Field:
    """Return what the values of a column show of its type."""
    is_small = True
    if pa.types.is_integer(values.type) and len(values) > values.null_count:
        limits = pc.min_max(values).as_py()
        is_small = limits["min"] >= -LARGEST and limits["max"] <= LARGEST
    return pa.field(name, values.type, nullable=is_small)


def joined(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return what two parts of the rows show together."""
    if one == other:
        return one
    columns = {column.name: column for column in one}
    for column in other:
        columns[column.name] = _wider(columns.get(column.name, column), column)
    return pa.schema(columns.values())


def _wider(one: pa.Field, other: pa.Field) -> pa.Field:
    is_small = one.nullable and other.nullable
    kinds = [one.type, other.type]
    if {*kinds} == {pa.int64(), pa.float64()}:
        kind = pa.float64() if is_small else pa.string()
    elif {*kinds} == {pa.date32(), pa.timestamp("us")}:
        kind = pa.timestamp("us")
    else:
        mixed = MIXED if any(map(pa.types.is_nested, kinds)) else pa.string()
        kind = wider_type(*kinds) or mixed
    return pa.field(one.name, kind, nullable=is_small)


def check_castable(own: pa.DataType, kind: pa.DataType) -> None:
    """Check that Arrow's cast from one type to another changes no value, also inside of values."""
    is_text = pa.types.is_string(kind) or pa.types.is_null(own)
    if pa.types.is_boolean(own) != pa.types.is_boolean(kind) and not is_text:
        raise pa.ArrowInvalid("a number is neither true nor false")
    is_number = pa.types.is_integer(own) or pa.types.is_floating(own)
    if is_number and (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
        raise pa.ArrowInvalid("a number cannot be a time, and might be rounded as a decimal")
    if pa.types.is_struct(own) and pa.types.is_struct(kind):
        names, known = [each.name for each in own], [each.name for each in kind]
        lower = {name.lower(): name for name in known}
        if any(lower.get(name.lower(), name) != name for name in names):
            raise pa.ArrowInvalid("a key is written in another case")
        shared = [name for name in names if name in known]
        if names and not shared:
            raise pa.ArrowInvalid("an object has none of the keys")
        for name in shared:
            check_castable(own.field(name).type, kind.field(name).type)
    elif pa.types.is_list(own) and pa.types.is_list(kind):
        check_castable(own.value_type, kind.value_type)
