"""Conversion of batches to the format that users' code gets."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.errors import SchemaError, StageError
from vane_dagster.pipeline.options import BatchFormat
from vane_dagster.types.frames import to_pandas, to_polars
from vane_dagster.types.kinds import is_list
from vane_dagster.types.row_values import holds_arrays, row_values
from vane_dagster.types.tensors import (
    is_element,
    is_multidimensional,
    numbers,
    object_array,
    row_shape,
    to_ndarray,
    whole,
)

_MOST_EXACT = 2**53
"""Up to it, floating-point numbers of 64 bits have all integers."""


def copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Copy a column into memory that nothing else shares.

    This is a plain memory copy, at about 15 GB/s. It trims slices to their own size. Numbers and
    arrays of numbers become one chunk, so that no format has to copy them again.
    """
    whole = column.num_chunks > 1 and (
        pa.types.is_primitive(column.type) or row_shape(column.type) is not None
    )
    pieces = [column.chunks] if whole else [[chunk] for chunk in column.chunks]
    return pa.chunked_array([pa.concat_arrays(piece) for piece in pieces], column.type)


def given_batch(batch: pa.Table, form: BatchFormat) -> Any:
    """Convert a copy of a batch to the format of the user's code, for one call.

    The code may write into the batch, for example by ``batch["x"] *= 2``, or through
    `torch.from_numpy`, which ignores read-only memory. Retries, halves of the batch and other
    stages must not see such writes.
    """
    own = [copied(column) for column in batch.columns]
    batch = pa.Table.from_arrays(own, schema=batch.schema)
    if form == "pyarrow":
        return batch
    if form == "polars":
        _package("polars", form)
        try:
            return to_polars(batch)
        except SchemaError as error:
            raise StageError(str(error)) from error
    _require_exact(batch, form)
    if form == "pandas":
        return to_pandas(batch)
    if form == "torch":
        torch = _package("torch", form)
        return {name: _to_torch(batch.column(name), torch) for name in batch.column_names}
    return {name: _writable(_to_numpy(batch.column(name))) for name in batch.column_names}


def _require_exact(batch: pa.Table, form: BatchFormat) -> None:
    """Refuse integers that a format with NaN for nulls would round to other ones."""
    for name, column in zip(batch.column_names, batch.columns):
        if column.null_count and column.type in (pa.int64(), pa.uint64()):
            limits = pc.min_max(column).as_py()
            if any(abs(each or 0) > _MOST_EXACT for each in limits.values()):
                raise StageError(
                    f"column {name!r} has nulls and integers beyond 2**53, which {form} batches "
                    "would round, because they store columns with nulls as floats. Leave it out of "
                    "columns= and name it in include_columns=, or use batch_format='pyarrow'"
                )


def _package(name: str, form: str) -> Any:
    """Import the package of a format."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StageError(
            f"batch_format={form!r} needs the package {name!r}, which this worker cannot import: "
            f"{error}. Install it in the workers' environment, or use another batch_format"
        ) from error


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as an array; of objects if a row is not a number, text or array."""
    kind = column.type
    if row_shape(kind) is not None:
        array = to_ndarray(whole(column))
        if array is not None:
            return array
        if is_multidimensional(kind):
            return object_array(row_values(column))
    if holds_arrays(kind) or pa.types.is_time(kind):
        return object_array(row_values(column))
    if is_element(kind) and not column.null_count:
        return numbers(whole(column))
    values: npt.NDArray[Any] = column.to_numpy()
    return values


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array, and the arrays inside of it, that users' code may write into."""
    if array.dtype == object and np.ndarray in set(map(type, array)):
        own = [_writable(row) if isinstance(row, np.ndarray) else row for row in array]
        return object_array(own)
    return array if array.flags.writeable else array.copy()


def _to_torch(column: pa.ChunkedArray, torch: Any) -> Any:
    """Return a column of numbers as a tensor, other columns as a list."""
    kind, shape = column.type, row_shape(column.type)
    element = kind.value_type if shape is None and is_list(kind) else kind
    if not is_element(element if shape is None else shape.value_type):
        return row_values(column)
    array = _to_numpy(column)
    if array.dtype != object:
        return torch.from_numpy(_writable(array))
    # Bools with nulls are objects, and rows with a null list inside are nested lists.
    arrays = [row for row in array if isinstance(row, np.ndarray)]
    if any(isinstance(row, list) for row in array) or any(row.dtype == object for row in arrays):
        return row_values(column)
    return [torch.tensor(row) if isinstance(row, np.ndarray) else row for row in array]
