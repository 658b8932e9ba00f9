"""Tables as data frames of pandas and polars, with arrays in place of tensors.

Both packages are imported only here, on use.
"""

from __future__ import annotations

import importlib
from typing import Any

import pyarrow as pa

from vane_dagster.errors import SchemaError
from vane_dagster.types.row_values import holds_arrays, row_values
from vane_dagster.types.tensors import (
    as_storage,
    is_multidimensional,
    is_tensor,
    nested,
    object_array,
    to_ndarray,
    whole,
)


def to_pandas(table: pa.Table) -> Any:
    """Convert a table to a `pandas.DataFrame`.

    Each value of a column of tensors, or of nested fixed-size lists of numbers, is an array of its
    shape.
    """
    importlib.import_module("pandas")  # pyarrow's own error does not name the package
    objects = [f.name for f in table.schema if holds_arrays(f.type) or f.type == pa.time64("ns")]
    frame = table.drop_columns(objects).to_pandas()
    for name in objects:
        column = table.column(name)
        array = to_ndarray(whole(column)) if is_multidimensional(column.type) else None
        rows = row_values(column) if array is None else list(array)
        frame.insert(table.column_names.index(name), name, object_array(rows))
    return frame


def to_polars(table: pa.Table) -> Any:
    """Convert a table to a `polars.DataFrame`; a column of tensors gets polars' type Array."""
    polars: Any = importlib.import_module("polars")
    columns = {}
    # All columns get the same chunks: polars would slice the others, and fails on null arrays.
    table = pa.Table.from_batches(table.to_batches(), table.schema)
    for name, column in zip(table.column_names, table.columns):
        kind = column.type
        if pa.types.is_decimal256(kind):  # polars would panic
            raise SchemaError(
                f"column {name!r} is {kind}, for which polars has no type; leave it out, cast it "
                "in a project, or use pyarrow"
            )
        if is_tensor(kind):
            column = pa.chunked_array([nested(chunk) for chunk in column.chunks or [whole(column)]])
        elif pa.types.is_fixed_size_list(kind):  # of slices with nulls polars takes all values
            column = pa.chunked_array([pa.concat_arrays([c]) for c in column.chunks], kind)
        else:
            column = as_storage(column)
        columns[name] = column
    return polars.from_arrow(pa.table(columns))
