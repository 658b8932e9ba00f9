"""Arguments and results of functions that get an array for each input column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster.errors import UdfError, names
from vane_dagster.pipeline.contracts import ColumnsCall
from vane_dagster.types.callables import qualname, signature_of
from vane_dagster.types.kinds import is_text
from vane_dagster.types.records import fields_of
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.results import from_result


def column_arguments(
    contract: ColumnsCall, batch: pa.Table, call: Callable[..., Any], location: str
) -> list[Any]:
    """Return the positional arguments of a call: a copy of each input column as an array."""
    given = given_batch(batch.select(list(dict.fromkeys(contract.columns))), contract.format)
    columns, shapes = [given[name] for name in contract.columns], contract.shapes
    if contract.stacks and len(columns) > 1 and _takes_one(call):
        if any(shapes[1:]):
            raise UdfError(
                f"{location}: {qualname(call)} takes one array of all {len(columns)} inputs, but "
                f"input_tensor_shapes has a shape for several; write "
                f"input_tensor_shapes=[[{len(columns)}]], or give it a parameter for each input"
            )
        stacked = np.stack([np.asarray(column) for column in columns], axis=1)
        return [_shaped(stacked, shapes[:1], "inputs", location)]
    if shapes and len(shapes) != len(columns):
        raise UdfError(
            f"{location}: {qualname(call)} takes {len(columns)} arrays, but input_tensor_shapes "
            "has 1 shape, that of one array of all inputs; give each input its shape, None for a "
            "scalar column"
        )
    return [
        _shaped(column, shapes[index : index + 1], name, location)
        for index, (name, column) in enumerate(zip(contract.columns, columns))
    ]


def _takes_one(call: Callable[..., Any]) -> bool:
    signature = signature_of(call)
    return signature is not None and len(signature.parameters) == 1


def _shaped(column: Any, shapes: Sequence[tuple[int, ...] | None], name: str, location: str) -> Any:
    """Return a column as an array of shape (rows, *shape)."""
    shape = shapes[0] if shapes else None
    if not shape:
        return column
    array = np.asarray(column)
    try:
        if array.dtype == object:
            array = np.stack([np.asarray(row) for row in column])
        shaped = array.reshape(-1, *shape)
        if len(shaped) != len(column):
            raise ValueError(f"a row has {array[0].size} elements")
    except (ValueError, TypeError) as error:
        raise UdfError(
            f"{location}: column {name!r} does not have shape {list(shape)} in each row: {error}. "
            "Expected lists of equal length without nulls; change input_tensor_shapes or the column"
        ) from None
    return shaped


def as_columns(contract: ColumnsCall, result: Any, op: CallUdf, work: Work) -> Any:
    """Return the result of a call as a table or a dict of column to array."""
    field = None if contract.output is None else work.schema.field(contract.output)
    if field is not None and not pa.types.is_struct(field.type):
        return {field.name: _text(result, field.type)}
    if isinstance(result, (list, tuple)):
        rows = _mappings(result, work)
        ids = {work.id, *op.ids, op.parent}
        declared = [n for n in op.made if n not in ids] if field is None else field.type.names
        _check_complete(rows, declared, work.location)
        if field is not None:
            return {field.name: result}
        shared = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
        return {name: [row[name] for row in rows] for name in shared}
    schema = work.schema if field is None else pa.schema(list(field.type))
    if isinstance(result, Mapping):
        kinds = dict(zip(schema.names, schema.types))
        result = {name: _text(values, kinds.get(name)) for name, values in result.items()}
        if field is not None:
            fields = from_result(result, schema, (), "", work.location).rows
            return {field.name: fields.to_struct_array()}
    return result if field is None else {field.name: result}


def _text(result: Any, kind: pa.DataType | None) -> Any:
    """Return a numpy array of UTF-8 bytes, as Triton returns text, as text if that is declared.

    So does Spark. Bytes that are not UTF-8 are returned as they are.
    """
    is_array = isinstance(result, np.ndarray) and result.ndim > 0 and result.dtype.kind in "OS"
    if kind is None or not is_text(kind) or not is_array:
        return result
    values = result.reshape(-1).tolist()
    if len(values) != len(result) or not any(isinstance(value, bytes) for value in values):
        return result
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError:
        return result


def _check_complete(
    rows: Sequence[Mapping[str, Any]], declared: Sequence[str], location: str
) -> None:
    """Raise UdfError for the first row that lacks a declared column."""
    for place, row in enumerate(rows):
        if missing := [name for name in declared if name not in row]:
            raise UdfError(
                f"{location}: row {place} of the {len(rows)} returned has no {missing[0]!r}, which "
                f"is declared; it has {names(row, 20)}. Return a value or None for it in each row"
            )


def _mappings(rows: Sequence[Any], work: Work) -> list[Mapping[str, Any]]:
    try:
        return [fields_of(row) for row in rows]
    except TypeError as error:
        raise UdfError(f"{work.location}: {error}") from None
