"""Values of users' code in host memory: arrays for tensors and images, lists for rows."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_PLAIN = frozenset({str, int, float, bool, bytes, list, dict, type(None)})
"""Types of values that are not arrays."""
_NOT_OF_NUMPY = ("torch.bfloat16", "torch.float8")
"""Floating-point types that numpy lacks; float32 has all of their values."""


def without_tensor(value: Any) -> Any:
    """Convert a tensor to an array in host memory; return any other value unchanged.

    A framework is used only if the process has already imported it.
    """
    if hasattr(value, "detach"):
        try:
            host = value.detach().cpu()
            if str(getattr(host, "dtype", "")).startswith(_NOT_OF_NUMPY):
                host = host.float()
            return host.numpy()
        except RuntimeError as error:  # a layout of torch that numpy does not have
            raise TypeError(str(error)) from error
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and tensorflow.is_tensor(value) and hasattr(value, "numpy"):
        return value.numpy()
    return value


def host_array(value: Any) -> Any:
    """Convert a tensor or image to an array in host memory; return other values unchanged.

    An array without dimensions, such as a loss, becomes a scalar, and a masked one None.
    """
    value = without_tensor(value)
    if isinstance(value, np.ndarray):
        return value if value.ndim else None if value is np.ma.masked else value[()]
    if isinstance(value, np.generic) or not hasattr(value, "__array__") or is_pandas(value):
        return value
    return host_array(np.asarray(value))


_NO_ARROW_TYPE = {
    "period[": "by .dt.to_timestamp() or .astype(str)",
    "Sparse[": "by .sparse.to_dense()",
    "complex": "into two columns, of .real and .imag",
    "Object": "by polars.Series([str(value) for value in column])",
}


def no_arrow_type(dtype: Any) -> str:
    """Return the fix for a type of pandas, polars or numpy that Arrow lacks, else nothing.

    Some are exported all the same: periods as ordinals, and objects of polars as addresses.
    """
    for prefix, fix in _NO_ARROW_TYPE.items():
        if str(dtype).startswith(prefix):
            return f"for which Arrow has no type. Convert it {fix}"
    return ""


def native(values: Any) -> Any:
    """Return an array in the byte order of the machine, the only one that Arrow reads."""
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def plain_rows(values: Any) -> list[Any]:
    """Return the values of rows, with None for masked and missing ones, arrays as numpy's."""
    missing = values.isna() if is_pandas(values) else ()
    rows = [value if type(value) in _PLAIN else host_array(value) for value in values]
    for place in np.flatnonzero(missing):
        rows[place] = None
    return rows


def is_pandas(values: Any) -> bool:
    """Return whether values are a column, index or data frame of pandas."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return False
    arrays = (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)
    return isinstance(values, (*arrays, pandas.DataFrame))


def exports_stream(values: Any) -> bool:
    """Return whether a column is read as an Arrow stream. A pandas Series is not.

    pandas exports NaN as a number, and cannot export columns of objects.
    """
    return hasattr(values, "__arrow_c_stream__") and not is_pandas(values)
