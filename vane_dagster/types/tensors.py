"""Tensor columns: Arrow's fixed-shape tensors, and their conversion from and to numpy arrays.

The elements of a row are one flat list in row-major order, so the same memory is a tensor column in
Arrow and an N-dimensional array in numpy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import SchemaError
from vane_dagster.types.casts import cast
from vane_dagster.types.host_arrays import native
from vane_dagster.types.kinds import holds, is_list, mapped


@known_keywords("vd.tensor")
def tensor(dtype: Any, shape: Sequence[int]) -> pa.FixedShapeTensorType:
    """Return the type of a column with a tensor of one shape in each row.

    It is Arrow's fixed-shape tensor (``arrow.fixed_shape_tensor``), also in published Parquet
    files. The store has the bytes of each tensor, which `load` reads without a copy.

    Functions receive a batch of tensors as one array of shape ``(rows, *shape)`` in the formats
    "numpy" and "torch", as arrays in a column in "pandas", as an ``Array`` in "polars" and as a
    ``FixedShapeTensorArray`` in "pyarrow". A function of single rows receives an array. Functions
    may write into numpy arrays; in pandas, assign to the column. With a null row, the batch is an
    object array of arrays and None, in torch a list. A null number is NaN; integers with nulls
    become float64.

    Results may be one array ``(rows, *shape)``, a list of arrays or tensors, nested lists, or flat
    lists in row-major order. Rows of another shape are refused.

    In SQL, a tensor is the flat list of its elements. In Delta tables, tensors are flat lists too,
    and uint8 and float16 become the next wider type. Sizes of DuckDB's fixed-size lists are written
    from the inside out: ``FLOAT[3][4]`` has the shape ``(4, 3)``. Such a list has at most 100,000
    elements, a tensor any number.

    Args:
        dtype: The type of the elements, a number or bool by the name in numpy or torch, or a type
            of Arrow: ``"float32"``, ``np.uint8``, ``torch.int64``, ``pa.float16()``.
        shape: The shape of a row's tensor, for example ``(3, 224, 224)``; the first dimension is
            the outermost. A batch of n rows is an array of shape ``(n, 3, 224, 224)``.

    Raises:
        SchemaError: If the elements are not numbers, or the shape is not a list of positive
            integers.

    Example:
        >>> tensor("uint8", (224, 224, 3)).shape
        [224, 224, 3]
    """
    value = _element_type(dtype)
    whole = (int, np.integer)
    sizes = [s for s in shape if isinstance(s, whole)] if isinstance(shape, (tuple, list)) else []
    if not sizes or len(sizes) < len(shape) or any(s is True or s < 1 for s in sizes):
        raise SchemaError(
            f"vd.tensor: shape is {shape!r}; expected the dimensions of a row as positive "
            "integers, without that of the batch, for example (3, 224, 224)"
        )
    return pa.fixed_shape_tensor(value, [int(size) for size in sizes])


def _element_type(dtype: Any) -> pa.DataType:
    kind = dtype
    if not isinstance(dtype, pa.DataType):
        name = dtype if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
        with contextlib.suppress(TypeError, pa.ArrowNotImplementedError):
            kind = pa.from_numpy_dtype(np.dtype(name))
    if not isinstance(kind, pa.DataType) or not is_element(kind):
        raise SchemaError(
            f"vd.tensor: dtype is {dtype!r}; expected the name of a number type or bool, such as "
            "'float32', 'float16', 'uint8', 'int64' or 'bool'"
        )
    return kind


def is_element(kind: pa.DataType) -> bool:
    """Return whether tensors can have elements of a type: numbers and bools, no decimals."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def is_tensor(kind: pa.DataType) -> bool:
    """Return whether a column holds tensors of numbers, in row-major order."""
    if not isinstance(kind, pa.FixedShapeTensorType) or not is_element(kind.value_type):
        return False
    return kind.permutation is None or kind.permutation == sorted(kind.permutation)


def holds_tensors(kind: pa.DataType) -> bool:
    """Return whether a type is a tensor, or has one inside."""
    return holds(kind, is_tensor)


def tensor_name(kind: pa.FixedShapeTensorType) -> str:
    """Return the expression that declares a tensor type."""
    value = "bool" if pa.types.is_boolean(kind.value_type) else kind.value_type.to_pandas_dtype()
    name = value if isinstance(value, str) else np.dtype(value).name
    return f'vd.tensor("{name}", {tuple(kind.shape)})'


def storage_type(kind: pa.DataType) -> pa.DataType:
    """Return a type with flat lists in place of tensors, inside of it too."""
    return mapped(kind, lambda each: _flat(each) if is_tensor(each) else each)


def _flat(kind: pa.FixedShapeTensorType) -> pa.DataType:
    return pa.list_(kind.value_type, kind.storage_type.list_size)


def as_storage(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert the tensors of a column to flat lists, because Arrow's kernels take no tensors."""
    return column.cast(storage_type(column.type)) if holds_tensors(column.type) else column


@dataclass(frozen=True)
class RowShape:
    """The array that a row of a column is.

    Attributes:
        value_type: The Arrow type of its elements.
        shape: Its shape.
    """

    value_type: pa.DataType
    shape: tuple[int, ...]


def row_shape(kind: pa.DataType) -> RowShape | None:
    """Return the shape of the rows of a tensor or of fixed-size lists, nested or not."""
    if is_tensor(kind):
        return RowShape(kind.value_type, tuple(kind.shape))
    sizes = []
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return RowShape(kind, tuple(sizes)) if sizes and pa.types.is_primitive(kind) else None


def is_multidimensional(kind: pa.DataType) -> bool:
    """Return whether the rows of a column are arrays: tensors, and fixed-size lists of such."""
    shape = row_shape(kind)
    return shape is not None and (is_tensor(kind) or len(shape.shape) > 1)


def to_ndarray(array: pa.Array) -> npt.NDArray[Any] | None:
    """View rows of one shape as an array of shape ``(rows, *shape)``.

    Numbers without nulls are not copied, and the array can be written if Arrow's memory can. Null
    elements are as in a column of scalars: NaN.
    """
    shape = row_shape(array.type)
    assert shape is not None, "asked for a type with a shape only"
    values = array.storage if is_tensor(array.type) else array
    while pa.types.is_fixed_size_list(values.type):
        if values.null_count:
            return None
        values = values.flatten()
    return numbers(values).reshape(len(array), *shape.shape)


def numbers(values: pa.Array) -> npt.NDArray[Any]:
    """View an array of scalars as a numpy array, of Arrow's own memory where it can be."""
    kind = values.type
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not plain or values.null_count or not len(values):
        array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return array
    dtype = np.dtype(kind.to_pandas_dtype())
    buffer = values.buffers()[1]
    return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)


def from_ndarray(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Convert an array of shape ``(rows, *shape)`` to a column of tensors or of nested lists.

    Elements of another number type are cast, if they lose nothing but floating-point precision.
    Masked elements become null.
    """
    wanted = row_shape(kind)
    shape = values.shape[1:]
    if wanted is not None and shape != wanted.shape:
        raise ValueError(_other_shape(shape, wanted.shape))
    array = pa.array(native(values.reshape(-1)))
    if wanted is not None and array.type != wanted.value_type:
        array = cast(array, wanted.value_type)
    if is_tensor(kind):
        flat = pa.FixedSizeListArray.from_arrays(array, type=storage_type(kind))
        return pa.ExtensionArray.from_storage(kind, flat)
    for axis in range(len(shape), 0, -1):
        array = _listed(array, math.prod(values.shape[:axis]), values.shape[axis])
    return cast(array, kind)


def _listed(values: pa.Array, count: int, size: int) -> pa.Array:
    """Divide values into lists of one size; Arrow's fixed-size lists cannot be empty."""
    if size:
        return pa.FixedSizeListArray.from_arrays(values, size)
    return pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), values)


def _other_shape(actual: Sequence[int], wanted: Sequence[int]) -> str:
    """Describe a wrong shape."""
    actual, wanted = tuple(int(size) for size in actual), tuple(wanted)
    if len(actual) == len(wanted) == 1:
        return f"vectors have {actual[0]} elements, not {wanted[0]}"
    return f"a row has shape {actual}, not {wanted}"


def stacked(rows: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    """Stack the arrays of rows, without the rows that are None; masks are kept."""
    given = [row for row in rows if row is not None]
    if len({row.shape for row in given}) != 1:
        return None
    masked = any(isinstance(row, np.ma.MaskedArray) for row in given)
    whole: npt.NDArray[Any] = np.ma.stack(given) if masked else np.stack(given)
    return whole


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; `combine_chunks` would copy a single chunk too."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def object_array(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return an object array; numpy itself would make arrays of one shape into one array."""
    return np.fromiter(values, object, len(values))


def array_rows(column: pa.ChunkedArray) -> list[Any]:
    """Return the array of each row, or None for a null row, in memory that nothing else shares.

    Rows with a null list inside, which no array can have, are nested Python lists.
    """
    array = to_ndarray(pa.concat_arrays(column.chunks).drop_null()) if len(column) else None
    if array is None:
        return list(column.to_pylist())
    rows = iter(array)
    return [next(rows) if is_valid else None for is_valid in column.is_valid().to_pylist()]


def with_null_rows(valid: pa.Array, is_null: Sequence[bool]) -> pa.Array:
    """Insert null rows."""
    if not any(is_null):
        return valid
    nulls = np.asarray(is_null, bool)
    places = pa.array(np.cumsum(~nulls) - 1, mask=nulls)
    return valid.take(places)


def unsliced(table: pa.Table) -> pa.Table:
    """Copy the columns of a table that hold nested fixed-size lists, which may be slices of others.

    Arrow's `take` and `filter` apply the offset of such a slice twice, and so return other rows
    (seen in pyarrow 26.0.1), even if the slice is inside of a struct or list. Flat fixed-size lists
    and tensors are not affected.
    """
    for place, column in enumerate(table.columns):
        if holds(column.type, _is_nested):
            copied = pa.chunked_array([pa.concat_arrays([chunk]) for chunk in column.chunks])
            table = table.set_column(place, table.schema.field(place), copied)
    return table


def _is_nested(kind: pa.DataType) -> bool:
    is_sized = pa.types.is_fixed_size_list
    return bool(is_sized(kind) and is_sized(kind.value_type))


def nested(array: pa.Array) -> pa.Array:
    """Convert tensors to nested fixed-size lists, which libraries without tensors understand."""
    shape = row_shape(array.type)
    assert shape is not None, "asked for a type with a shape only"
    valid = array.drop_null()
    values = valid.storage.flatten()
    for size in reversed(shape.shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return with_null_rows(values, array.is_null().to_pylist()) if array.null_count else values


def from_lists(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert flat or nested lists, or tensors of another type, to tensors."""
    wanted = row_shape(kind)
    assert wanted is not None, "asked for a tensor type only"
    if is_tensor(array.type):
        if tuple(array.type.shape) != wanted.shape:
            raise ValueError(_other_shape(array.type.shape, wanted.shape))
        array = array.storage
    value, depth = array.type, 0
    while is_list(value):
        value, depth = value.value_type, depth + 1
    if depth == 1:  # Arrow's own storage of a tensor
        flat = cast(array, storage_type(kind))
        return pa.ExtensionArray.from_storage(kind, flat)
    lists = wanted.value_type
    for size in reversed(wanted.shape):
        lists = pa.list_(lists, size)
    if depth != len(wanted.shape):
        raise ValueError(f"lists have {depth} dimensions, not {len(wanted.shape)}")
    values = pa.concat_arrays([array]).drop_null()  # see unsliced
    values = cast(values, lists)
    while pa.types.is_fixed_size_list(values.type):
        if values.null_count:
            raise ValueError("a list inside a row is null; a tensor has all of its elements")
        values = values.flatten()
    flat = pa.FixedSizeListArray.from_arrays(values, type=storage_type(kind))
    rows = pa.ExtensionArray.from_storage(kind, flat)
    return with_null_rows(rows, array.is_null().to_pylist()) if array.null_count else rows
