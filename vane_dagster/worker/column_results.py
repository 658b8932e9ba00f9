"""Arguments and results of functions that get an array for each input column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster.errors import UdfError
from vane_dagster.pipeline.contracts import ColumnsCall
from vane_dagster.types.callables import qualname, signature_of
from vane_dagster.types.records import fields_of
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.protocol import Work
from vane_dagster.worker.results import from_result


def column_arguments(
    contract: ColumnsCall, batch: pa.Table, call: Callable[..., Any], location: str
) -> list[Any]:
    """Return the positional arguments of a call: a copy of each input column as an array."""
    given = given_batch(batch.select(list(dict.fromkeys(contract.columns))), contract.format)
    columns, shapes = [given[name] for name in contract.columns], contract.shapes
    count = len(columns)
    is_stacked = contract.stacks and count > 1 and _takes_one(call)
    if shapes and len(shapes) != (arrays := 1 if is_stacked else count):
        raise UdfError(
            f"{location}: input_tensor_shapes has {len(shapes)} shapes; expected {arrays}: one for "
            f"each array that {qualname(call)} takes, None for a scalar column"
        )
    if is_stacked:
        stacked = np.stack([np.asarray(column) for column in columns], axis=1)
        return [_shaped(stacked, shapes[0] if shapes else None, "inputs", location)]
    return [
        _shaped(column, shape, name, location)
        for name, column, shape in zip_longest(contract.columns, columns, shapes)
    ]


def _takes_one(call: Callable[..., Any]) -> bool:
    signature = signature_of(call)
    return signature is not None and len(signature.parameters) == 1


def _shaped(column: Any, shape: Sequence[int] | None, name: str, location: str) -> Any:
    """Return a column as an array of shape (rows, *shape)."""
    if not shape:
        return column
    array = np.asarray(column)
    try:
        if array.dtype == object:
            array = np.stack([np.asarray(row) for row in column])
        return array.reshape(len(column), *shape)
    except (ValueError, TypeError) as error:
        raise UdfError(
            f"{location}: column {name!r} does not have shape {list(shape)} in each row: {error}. "
            "Expected lists of equal length without nulls; change input_tensor_shapes or the column"
        ) from None


def as_columns(contract: ColumnsCall, result: Any, work: Work) -> Any:
    """Return the result of a call as a table or a dict of column to array."""
    if contract.output is not None:
        kind = work.schema.field(contract.output).type
        if pa.types.is_struct(kind) and isinstance(result, Mapping):
            fields = from_result(result, pa.schema(list(kind)), (), "", work.location)
            result = fields.to_struct_array()
        return {contract.output: result}
    if isinstance(result, (list, tuple)):
        rows = [fields_of(row) for row in result]
        shared = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
        return {name: [row[name] for row in rows] for name in shared}
    return result
