"""The types of columns that rows show, block by block and file by file, and those of all of them.

A schema stands for what rows show. A column of whole numbers that a double does not hold is not
nullable there, because with fractions it is text. Values without a common type are `MIXED`.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.sources.schemas import wider_type

MIXED = pa.dense_union([])
"""The type of a column with values that have no common one."""
LARGEST = 2**53
"""The whole numbers up to it are those that a double holds."""


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
    found = {column.name: column for column in one}
    for column in other:
        found[column.name] = _wider(found.get(column.name, column), column)
    return pa.schema(found.values())


def _wider(one: pa.Field, other: pa.Field) -> pa.Field:
    is_small = one.nullable and other.nullable
    kinds = [one.type, other.type]
    if {*kinds} == {pa.int64(), pa.float64()}:
        found = pa.float64() if is_small else pa.string()
    elif {*kinds} == {pa.date32(), pa.timestamp("us")}:
        found = pa.timestamp("us")
    else:
        found = wider_type(*kinds) or wider_type(*map(_with_doubles, kinds))
        found = found or (MIXED if any(map(pa.types.is_nested, kinds)) else pa.string())
    return pa.field(one.name, found, nullable=is_small)


def _with_doubles(kind: pa.DataType) -> pa.DataType:
    """Return a nested type with doubles in place of whole numbers."""
    if pa.types.is_list(kind):
        return pa.list_(_with_doubles(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _with_doubles(f.type)) for f in kind])
    return pa.float64() if kind == pa.int64() else kind
