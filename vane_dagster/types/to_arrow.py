"""Columns that users' code returns, as Arrow arrays of their declared types."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster.errors import names
from vane_dagster.types.casts import Mismatch, cast
from vane_dagster.types.host_arrays import (
    exports_stream,
    host_array,
    is_pandas,
    native,
    no_arrow_type,
    plain_rows,
)
from vane_dagster.types.kinds import holds, is_list, is_text, mapped
from vane_dagster.types.records import fields_or_none
from vane_dagster.types.tensors import (
    from_lists,
    from_ndarray,
    is_multidimensional,
    is_tensor,
    nested,
    row_shape,
    stacked,
    with_null_rows,
)

_SINGLE = "a single value, not one for each row. Return a list or an array"
_DICT = "a dict. Return one of its values, or a list with a dict for each row"
_UNORDERED = "a set, whose values have no order. Return a list or an array"
_ARROW_UNITS = ("s", "ms", "us", "ns")


class UnknownField(TypeError):
    """A struct has a field that the type lacks.

    Attributes:
        path: The fields of structs that lead to it, and its name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"a dict has a field {name!r}, which the type lacks")
        self.path = [name]


def to_arrow(values: Any, kind: pa.DataType, closed: bool = False) -> Any:
    """Convert a column to a type.

    The type of the values is inferred, and then cast: to a type of the same kind, if no value
    changes but for the precision of floating-point numbers. None and masked values become null. NaN
    stays a number, except in pandas, where it stands for a missing value. An array of shape (n, 1)
    is a column of scalars. Dataclasses, pydantic models and named tuples are structs, members of an
    enum their values.
    """
    column = as_column(values)
    if isinstance(column, list):
        array = _from_rows(column, kind, closed)
    elif isinstance(column, (pa.Array, pa.ChunkedArray)):
        array = column
    elif column.ndim > 1:
        array = _from_array(column, kind)
    elif column.dtype.kind in "mM" and not is_pandas(column):
        array = _from_times(column, kind)
    else:
        array = pa.array(column)
    if is_tensor(kind):
        array = _each_chunk(array, lambda chunk: _as_tensors(chunk, kind))
    elif is_multidimensional(kind) and is_tensor(array.type):
        array = _each_chunk(array, nested)
    elif array.type == pa.uuid() and is_text(kind):
        array = _each_chunk(array, _texts)
    elif isinstance(array.type, pa.BaseExtensionType):
        array = _each_chunk(array, lambda chunk: chunk.storage)
    return array if array.type == kind else cast(array, kind)


def as_column(values: Any) -> Any:
    """Return a column as an Arrow array, an array or Series with a type, or a list of rows."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, Mapping):
        raise ValueError(_DICT)
    if isinstance(values, (str, bytes)):
        raise ValueError(_SINGLE)
    if isinstance(values, (set, frozenset)):
        raise TypeError(_UNORDERED)
    if hasattr(values, "columns") and (hasattr(values, "ndim") or exports_stream(values)):
        raise TypeError("a data frame. Return one of its columns, or its values by to_numpy()")
    if reason := no_arrow_type(dtype := getattr(values, "dtype", None)):
        raise TypeError(f"it is {dtype}, {reason}")
    if exports_stream(values):
        return pa.chunked_array(values)
    if hasattr(values, "__arrow_c_array__"):
        return pa.array(values)
    if not is_pandas(values):
        values = host_array(values)
    if isinstance(values, memoryview):
        values = np.asarray(values)
    if getattr(getattr(values, "dtype", None), "names", None):  # a structured array
        return plain(values)
    if getattr(values, "ndim", 0) and values.dtype != object:
        return values if is_pandas(values) else _in_arrow_unit(native(values))
    if not hasattr(values, "__len__") and not isinstance(values, Iterable):
        raise ValueError(_SINGLE)
    return plain_rows(values)


def _each_chunk(array: Any, convert: Callable[[pa.Array], pa.Array]) -> Any:
    if isinstance(array, pa.ChunkedArray):
        if not array.num_chunks:
            return pa.chunked_array([convert(array.combine_chunks())])
        return pa.chunked_array([convert(chunk) for chunk in array.chunks])
    return convert(array)


def _texts(values: pa.Array) -> pa.Array:
    return pa.array([value and str(value) for value in values.to_pylist()], pa.string())


def _as_tensors(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return array.cast(kind)
    if not is_list(array.type) and not is_tensor(array.type):
        raise TypeError(f"values are {array.type}, one for each row")
    return from_lists(array, kind)


def _from_times(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Convert dates, times and durations of numpy."""
    if values.dtype == "M8[D]" and pa.types.is_timestamp(kind):
        values = values.astype("M8[s]")
    return _zoned(pa.array(values), kind)


def _in_arrow_unit(values: Any) -> Any:
    """Return an array or a scalar of numpy, times in a unit that Arrow has too."""
    if (name := values.dtype.kind) not in "mM":
        return values
    unit = np.datetime_data(values.dtype)[0]
    if unit in ("W", "h", "m", *(("Y", "M") if name == "M" else "D")):
        unit = "s"
    elif unit not in _ARROW_UNITS and unit != "D":
        raise TypeError(
            f"values are {values.dtype}, a unit that no column has. Convert them, for example by "
            f'.astype("{name}8[ns]")'
        )
    return values.astype(f"{name}8[{unit}]")


def _zoned(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Give times of numpy, or lists of them, the time zone of a type.

    Numpy has no time zones: columns with one are given to users in UTC, and come back so.
    """
    while is_list(kind):
        kind = kind.value_type
    zone = getattr(kind, "tz", None)

    def convert(each: pa.DataType) -> pa.DataType:
        return pa.timestamp(each.unit, zone) if pa.types.is_timestamp(each) else each

    return array.cast(mapped(array.type, convert))


def _from_array(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Convert an array of several dimensions; a scalar's dimension of 1 is squeezed."""
    if is_list(kind) or is_tensor(kind):
        return from_ndarray(values, kind)
    if set(values.shape[1:]) == {1}:
        return pa.array(values.reshape(-1))
    one = "a vector" if values.ndim == 2 else "an array"
    name = f'vd.tensor("{values.dtype.name}", {tuple(int(n) for n in values.shape[1:])})'
    raise TypeError(f"an array of shape {values.shape} has {one} a row. Declare {name}")


_LISTS = (list, tuple, set, frozenset, np.ndarray)


def _from_rows(rows: list[Any], kind: pa.DataType, closed: bool) -> pa.Array:
    first = next((row for row in rows if row is not None), None)
    ndim = first.ndim if isinstance(first, np.ndarray) else None
    kinds = (pa.types.is_struct, pa.types.is_map, is_tensor)
    records = any(holds(kind, is_kind) for is_kind in kinds)
    if ndim is not None and all(isinstance(row, (np.ndarray, type(None))) for row in rows):
        several = len({row.dtype for row in rows if row is not None}) > 1
        stack = row_shape(kind) is not None or ndim > 1 or not pa.types.is_nested(kind)
        if stack or (several and not records):
            return _from_arrays(rows, kind)
        rows = [plain(row) if isinstance(row, np.ma.MaskedArray) else row for row in rows]
    if is_tensor(kind):
        return _inferred(rows, kind.value_type) if first is not None else pa.nulls(len(rows), kind)
    if records:
        return _nested_rows(rows, kind, closed)
    return _inferred(rows, kind)


def inferred_type(rows: list[Any]) -> pa.DataType:
    """Return the type of rows by the rules of `to_arrow`, also of those inside of dicts."""
    if _classes(rows) != {dict}:
        return _inferred(rows, pa.null()).type
    given = [row for row in rows if row is not None]
    if not isinstance(given[0], dict):
        return pa.list_(inferred_type([*chain.from_iterable(given)]))
    fields = dict.fromkeys(name for row in given for name in row)
    return pa.struct([(name, inferred_type([row.get(name) for row in given])) for name in fields])


def _inferred(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert scalars, or lists of them, to the type that they have themselves."""
    classes = _classes(rows)
    is_numpy = classes == {np.datetime64}
    if any(map(_needs_plain, classes)):
        rows = [plain(row) for row in rows]
        classes = _classes(rows)
    if len(families := {_family(each) for each in classes}) > 1 and families not in _MIXED:
        listed = ", ".join(sorted(each.__name__ for each in classes))
        raise ValueError(f"rows have different types: {listed}. Return one type in all rows")
    try:
        inferred = pa.infer_type(rows)
    except (pa.ArrowException, TypeError):  # arrays beside lists
        rows = [plain(row) for row in rows]
        inferred = pa.infer_type(rows)
    exact = _exact(kind, inferred)
    if families & _TIMES:
        exact = _checked_times(rows, exact)
    array = pa.array(rows) if exact == inferred else pa.array(rows, exact)
    return _zoned(array, kind) if is_numpy else array


_FAMILIES: Sequence[tuple[str, tuple[type, ...]]] = (
    ("bool", (bool, np.bool_)),
    ("integer", (int, np.integer)),
    ("float", (float, np.floating)),
    ("text", (str,)),
    ("bytes", (bytes, bytearray, memoryview)),
    ("timestamp", (dt.datetime, np.datetime64)),
    ("date", (dt.date,)),
    ("duration", (dt.timedelta, np.timedelta64)),
    ("time", (dt.time,)),
    ("decimal", (decimal.Decimal,)),
)
"""Classes of values that Arrow converts to one type. A class belongs to the first that has it."""
_MIXED = ({"integer", "float"}, {"integer", "decimal"})
_TIMES = {"timestamp", "time", "duration"}


@functools.lru_cache(maxsize=256)
def _family(kind: type) -> str:
    return next((name for name, kinds in _FAMILIES if issubclass(kind, kinds)), kind.__qualname__)


def _classes(rows: Iterable[Any]) -> set[type]:
    """Return the classes of values, or of the values in lists of them."""
    classes = set(map(type, rows))
    classes.discard(type(None))
    if not classes or not all(issubclass(each, _LISTS) for each in classes):
        return classes
    lists = [row for row in rows if row is not None]
    arrays = {
        row.dtype.type for row in lists if isinstance(row, np.ndarray) and row.dtype != object
    }
    rest = (row for row in lists if not isinstance(row, np.ndarray) or row.dtype == object)
    return arrays | _classes(list(chain.from_iterable(rest)))


def _needs_plain(kind: type) -> bool:
    """Return whether Arrow does not read values of a class, or not as what they are."""
    if issubclass(kind, (enum.Enum, np.datetime64, np.timedelta64)):
        return True
    return kind.__name__ in ("NAType", "NaTType") and kind.__module__.startswith("pandas.")


def plain(value: Any) -> Any:
    """Return a value, or a list of values, as plain Python values without enums and arrays."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.ndarray):
        if fields := value.dtype.names:
            columns = [plain(value[name]) for name in fields]
            return [dict(zip(fields, row)) for row in zip(*columns)]
        # tolist() would make integers of nanoseconds.
        return [plain(each) for each in value] if value.dtype.kind in "OmM" else value.tolist()
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, (np.datetime64, np.timedelta64)):
        value = _in_arrow_unit(value)
        if np.datetime_data(value.dtype)[0] == "ns":  # more than Python's classes hold
            return None if np.isnat(value) else value
        if value.dtype != "M8[D]":
            value = value.astype(f"{value.dtype.kind}8[us]")
        return value.item()
    return None if _needs_plain(type(value)) else value


def _exact(kind: pa.DataType, inferred: pa.DataType) -> pa.DataType:
    """Return the type to which Arrow converts Python values without a change that it conceals.

    It cuts fractions off for integers, drops time zones, and reads numbers as times, for example.
    """
    if is_list(inferred):
        inner = kind.value_field if is_list(kind) else pa.field("item", kind)  # or a tensor's
        value = inner.with_type(_exact(inner.type, inferred.value_type))
        return pa.list_(value, kind.list_size if pa.types.is_fixed_size_list(kind) else -1)
    exact = (
        pa.types.is_null(inferred)
        or (pa.types.is_integer(inferred) and (pa.types.is_decimal(kind) or kind == pa.uint64()))
        or (pa.types.is_binary(inferred) and pa.types.is_fixed_size_binary(kind))
    )
    if pa.types.is_decimal128(inferred):  # with as many digits as the first values have
        return pa.decimal128(MAX_DIGITS, inferred.scale)
    return kind if exact else inferred


MAX_DIGITS = 38


def _checked_times(rows: Iterable[Any], inferred: pa.DataType) -> pa.DataType:
    """Return the type of times, after checks that Arrow does not make."""
    if is_list(inferred):
        inner = chain.from_iterable(row for row in rows if row is not None)
        return pa.list_(_checked_times(list(inner), inferred.value_type))
    values = [value for value in rows if value is not None]
    zoned = {getattr(value, "tzinfo", None) is not None for value in values}
    if len(zoned) > 1:
        raise ValueError(
            "a part of the values has a time zone. Return all with one, for example by "
            "value.replace(tzinfo=datetime.timezone.utc) for values in UTC"
        )
    if zoned == {True} and pa.types.is_time(inferred):
        raise ValueError(
            "times of day have a time zone, which no type holds. Return "
            "value.replace(tzinfo=None), or a datetime"
        )
    if any(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0) for value in values):
        timed = pa.types.is_timestamp(inferred)  # of pandas, which Arrow infers to be microseconds
        return pa.timestamp("ns", inferred.tz) if timed else pa.duration("ns")
    return inferred


def _from_arrays(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert an array a row: one array of all if they have one shape."""
    if len({row.dtype for row in rows if row is not None}) > 1:  # numpy would make them one
        pieces = [to_arrow(row[None], kind) for row in rows if row is not None]
        return with_null_rows(pa.concat_arrays(pieces), [row is None for row in rows])
    array = stacked(rows)
    if array is not None:
        array = _in_arrow_unit(array)
        valid = pa.array(array) if array.ndim == 1 else _from_array(array, kind)
        return with_null_rows(valid, [row is None for row in rows])
    if not pa.types.is_nested(kind) and not is_tensor(kind):
        raise TypeError("values are arrays")
    if row_shape(kind) is not None:
        shapes = list(dict.fromkeys(row.shape for row in rows if row is not None))
        raise ValueError(f"rows have the shapes {names(shapes)}; expected one shape")
    return _inferred([plain(row) for row in rows], kind)


def _nested_rows(rows: list[Any], kind: pa.DataType, closed: bool) -> pa.Array:
    """Convert structs, maps, and lists of them, by their inner values."""
    given = [row for row in rows if row is not None]
    is_null = [row is None for row in rows]
    if pa.types.is_struct(kind):
        records = [row if type(row) is dict else _record(row) for row in given]
        if closed:
            _check_known(records, kind)
        columns = [_field(_of_field(records, f.name, kind), f, closed) for f in kind]
        return with_null_rows(pa.StructArray.from_arrays(columns, fields=list(kind)), is_null)
    if pa.types.is_map(kind):
        given = [list(row.items()) if isinstance(row, Mapping) else row for row in given]
    if odd := next((row for row in given if not isinstance(row, _LISTS)), None):
        raise TypeError(f"a value is of type {type(odd).__name__}, not a list")
    offsets = pa.array(np.cumsum([0, *map(len, given)], dtype=np.int32))
    inner = list(chain.from_iterable(given))
    if pa.types.is_map(kind):
        keys = _field([key for key, _ in inner], kind.key_field, closed)
        items = _field([item for _, item in inner], kind.item_field, closed)
        return with_null_rows(pa.MapArray.from_arrays(offsets, keys, items, kind), is_null)
    lists = pa.ListArray.from_arrays(offsets, to_arrow(inner, kind.value_type, closed))
    return with_null_rows(lists, is_null)


def _record(value: Any) -> Mapping[str, Any]:
    fields = fields_or_none(value)
    if fields is None:
        raise TypeError(f"a value is of type {type(value).__name__}, not a dict")
    return fields


def _of_field(records: list[Mapping[str, Any]], name: str, kind: pa.DataType) -> list[Any]:
    """Return the values of a field. It may be left out, and others are ignored, but not both."""
    try:
        return [record[name] for record in records]
    except KeyError:
        for record in records:
            others = [other for other in record if other not in kind.names]
            if name not in record and others:
                raise TypeError(
                    f"a dict lacks {name!r} and has {names(others)}, which the type does not have"
                ) from None
        return [record.get(name) for record in records]


def _check_known(records: list[Mapping[str, Any]], kind: pa.DataType) -> None:
    known = frozenset(kind.names)
    for record in records:
        if unknown := next((name for name in record if name not in known), None):
            raise UnknownField(unknown)


def _field(values: list[Any], field: pa.Field, closed: bool) -> pa.Array:
    try:
        return to_arrow(values, field.type, closed)
    except (Mismatch, UnknownField) as error:
        error.path.insert(0, field.name)
        raise
