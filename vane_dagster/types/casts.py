"""Casts that keep every value. Arrow's own also round, cut, and drop time zones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.types.kinds import is_bytes, is_list, is_number, is_text

_UINT64_DIGITS = 20
_ROUNDING = 4
"""Units in the last place by which Arrow's casts of decimals to floats may be wrong, doubled."""


class Mismatch(TypeError):
    """Values are not of the declared type.

    Attributes:
        actual: Their type.
        wanted: The declared type.
        reason: Why they do not fit; empty if the types are of different kinds.
        path: The fields of structs that lead to them.
    """

    def __init__(self, actual: pa.DataType, wanted: pa.DataType, reason: str = "") -> None:
        super().__init__(f"values are {actual}, not {wanted}{reason and f': {reason}'}")
        self.actual, self.wanted, self.reason = actual, wanted, reason
        self.path: list[str] = []


def cast(values: Any, kind: pa.DataType) -> Any:
    """Cast an array to a type of the same kind: number to number, text to text, list to list."""
    if pa.types.is_dictionary(values.type) and values.null_count == len(values):
        return pa.nulls(len(values), kind)  # its categories are of any type
    if not _are_alike(values.type, kind):
        raise Mismatch(values.type, kind)
    try:
        if pa.types.is_dictionary(values.type):
            if pa.types.is_string_view(values.type.value_type):  # polars' categories
                # Arrow cannot decode them.
                values = values.cast(pa.dictionary(values.type.index_type, pa.string()))
            values = values.cast(values.type.value_type)
        return checked_cast(values, kind)
    except pa.ArrowException as error:
        raise Mismatch(values.type, kind, str(error)) from error


def cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Select the columns of a schema, casting only those whose type differs.

    Arrow damages lists with a null-typed field when it casts them to their own type.
    """
    columns = [table.column(field.name) for field in schema]
    cast = [c if c.type == field.type else c.cast(field.type) for c, field in zip(columns, schema)]
    return pa.Table.from_arrays(cast, schema=schema)


def checked_cast(values: Any, kind: pa.DataType) -> Any:
    """Cast an array as Arrow does, but raise an error where Arrow changes a value silently."""
    if pa.types.is_integer(values.type) and pa.types.is_decimal(kind):
        values = values.cast(pa.decimal128(_UINT64_DIGITS, 0))  # as wide as the type, else refused
    result = values if values.type == kind else values.cast(kind)
    _check_kept(values, result)
    return result


def _are_alike(actual: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a cast keeps the meaning of values."""
    if pa.types.is_null(actual):
        return True
    if pa.types.is_dictionary(actual):
        return _are_alike(actual.value_type, wanted)
    if is_list(actual) and is_list(wanted):
        return _are_alike(actual.value_type, wanted.value_type)
    if pa.types.is_struct(actual) and pa.types.is_struct(wanted):
        fields = {field.name: field.type for field in actual}
        return fields.keys() == set(wanted.names) and all(
            _are_alike(fields[field.name], field.type) for field in wanted
        )
    if pa.types.is_map(actual) and pa.types.is_map(wanted):
        keys = _are_alike(actual.key_type, wanted.key_type)
        return keys and _are_alike(actual.item_type, wanted.item_type)
    if is_bytes(actual) and is_text(wanted):  # if they are UTF-8, as Triton and Spark return text
        return not pa.types.is_fixed_size_binary(actual)
    if _is_moment(actual) and _is_moment(wanted):
        return (getattr(actual, "tz", None) is None) == (getattr(wanted, "tz", None) is None)
    families = (is_number, is_text, pa.types.is_boolean, pa.types.is_time, pa.types.is_duration)
    return any(family(actual) and family(wanted) for family in (*families, is_bytes))


def _is_moment(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _check_kept(before: Any, after: Any) -> None:
    """Raise ArrowInvalid if a cast has changed a value that Arrow itself does not check."""
    actual, wanted = before.type, after.type
    if actual == wanted or pa.types.is_null(actual):
        return
    if is_list(actual) and is_list(wanted):
        _check_kept(pc.list_flatten(before), pc.list_flatten(after))
    elif pa.types.is_struct(actual):
        for field in (each for each in wanted if each.name in actual.names):
            _check_kept(pc.struct_field(before, field.name), pc.struct_field(after, field.name))
    elif pa.types.is_map(actual):
        for some, other in zip(_arrays(before), _arrays(after)):
            some, other = pa.concat_arrays([some]), pa.concat_arrays([other])  # without offsets
            _check_kept(some.keys, other.keys)
            _check_kept(some.items, other.items)
    elif pa.types.is_floating(actual) and pa.types.is_decimal(wanted):
        given = _numbers(before)
        error = np.abs(given - _numbers(after.cast(actual)))
        if (error > _ROUNDING * np.finfo(given.dtype).eps * np.abs(given)).any():
            raise pa.ArrowInvalid(f"a value has more than {wanted.scale} digits after the point")
    elif pa.types.is_integer(actual) and pa.types.is_float16(wanted):
        if not np.array_equal(_numbers(before), _numbers(after).astype(np.float64)):
            raise pa.ArrowInvalid(f"an integer is not exact as a {wanted}")
    elif pa.types.is_floating(wanted):
        narrower = not pa.types.is_floating(actual) or wanted.bit_width < actual.bit_width
        if narrower and (infinite := _infinite(after)) and infinite > _infinite(before):
            raise pa.ArrowInvalid(f"a value is too large for {wanted}")
    elif pa.types.is_date(wanted) and not after.cast(actual).equals(before):
        raise pa.ArrowInvalid("a value has a time of day")


def _arrays(column: Any) -> list[pa.Array]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]


def _numbers(column: Any) -> npt.NDArray[Any]:
    """Return the values that are not null."""
    return np.asarray(column.drop_null())


def _infinite(column: Any) -> int:
    return pc.sum(pc.is_inf(column)).as_py() or 0
