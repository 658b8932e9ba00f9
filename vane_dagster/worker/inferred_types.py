"""The types of results of users' functions, for stages without a declared schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster.errors import SchemaError, UdfError, names
from vane_dagster.pipeline.contracts import TYPES, TypesCall
from vane_dagster.types.kinds import mapped
from vane_dagster.types.records import fields_of, fields_or_none
from vane_dagster.types.schema import merged_types, plain_type, schema_record, type_name
from vane_dagster.types.tensors import is_element, stacked, tensor
from vane_dagster.types.to_arrow import as_column, inferred_type
from vane_dagster.worker.kept_values import kept
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.results import result_columns
from vane_dagster.worker.row_results import RowResults


def result_types(result: Any, op: CallUdf, work: Work) -> pa.Schema:
    """Return the columns of the result of a call with a batch."""
    columns = result_columns(result, pa.schema([]), op.ids[0], work.location)[0]
    return _schema(columns, work.location)


def types_table(schemas: Iterable[pa.Schema], ids: pa.ChunkedArray, op: CallUdf, work: Work) -> Any:
    """Return a row for each input row, with the types that the calls for them returned."""
    schema = merged_types(schemas, work.location)
    records = pa.array([schema_record(schema)] * len(ids), pa.string())
    return pa.table({op.ids[0]: ids, TYPES: records})


class RowTypes(RowResults):
    """The types of the results of the calls for the rows of a batch."""

    def _table(self) -> pa.Table:
        places = [i for i in range(self._batch.num_rows) if i not in self._errors]
        given = [value for value in self.values if value is not None]
        named = self._contract.output is not None
        of_fields = [not named and fields_or_none(value) is not None for value in given]
        columns: dict[str, Any] = {}
        if any(of_fields):
            rows = [fields_of(value) for value in given]
            columns = {
                name: [row[name] for row in rows if name in row]
                for name in dict.fromkeys(name for row in rows for name in row)
            }
        elif given or named:
            assert isinstance(self._op.contract, TypesCall)
            columns = {self._contract.output or self._op.contract.column: self.values}
        schema = _schema(columns, self._work.location)
        ids = self._batch.column(self._op.ids[0]).take(pa.array(places, pa.int64()))
        return types_table([schema], ids, self._op, self._work)


def _schema(columns: Mapping[str, Any], location: str) -> pa.Schema:
    types = {}
    for name, values in columns.items():
        try:
            types[name] = mapped(plain_type(column_type(values)), _in_zone)
        except (pa.ArrowException, SchemaError, TypeError, ValueError, OverflowError) as error:
            raise UdfError(
                f"{location}: the type of column {name!r} cannot be inferred: {error}. Convert it "
                "in the function, or declare the schema"
            ) from error
    return pa.schema(types)


def _in_zone(kind: pa.DataType) -> pa.DataType:
    """Return a type with UTC in place of an offset, which polars does not read as a zone."""
    is_offset = (getattr(kind, "tz", None) or "").startswith(("+", "-"))
    return pa.timestamp(kind.unit, "UTC") if is_offset else kind


def column_type(values: Any) -> pa.DataType:
    """Return the Arrow type of a column of a result.

    An array of two dimensions is a column of lists of one size; one of more dimensions is a column
    of tensors.
    """
    column = as_column(values)
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        return column.type
    if not isinstance(column, list):
        return plain_type(_array_type(column))
    given = [row for row in column if row is not None]
    if given and all(isinstance(row, np.ndarray) and row.ndim > 1 for row in given):
        if (array := stacked(given)) is None:
            shapes = names(dict.fromkeys(row.shape for row in given))
            kind = pa.array(given[0].reshape(-1)[:0]).type
            for _ in range(given[0].ndim):
                kind = pa.list_(kind)
            as_lists = f", or {type_name(kind)} in the schema: nested lists of any length"
            is_alike = len({row.ndim for row in given}) == 1
            raise TypeError(
                f"its arrays have the shapes {shapes}; expected one shape{as_lists * is_alike}"
            )
        return _array_type(array)
    return inferred_type(list(map(kept, column)))


def _array_type(values: Any) -> pa.DataType:
    """Return the type of an array with the rows in its first dimension."""
    inner = tuple(int(size) for size in values.shape[1:])
    kind = pa.array(values.reshape(-1)[:1] if inner else values).type
    if len(inner) > 1 and is_element(kind):
        return tensor(kind, inner)
    for size in reversed(inner):
        kind = pa.list_(kind, size)
    return kind
